// Asks the search of a built site, as its pages do: node site_search.js SITE QUESTION... prints a JSON list of the places
// found for each question, the best page first.
const fs = require("fs"), path = require("path"), vm = require("vm");
const [site, ...questions] = process.argv.slice(2);
const workers = path.join(site, "assets/javascripts/workers");
const script = fs.readdirSync(workers).find(name => name.startsWith("search.") && name.endsWith(".js"));
let receive, answer;
const scope = { console, setTimeout, URL, performance, fetch: () => { throw new Error("nothing is fetched"); } };
Object.assign(scope, {
  self: scope, window: scope, location: new URL("http://localhost/assets/javascripts/workers/search.js"),
  importScripts: () => {}, addEventListener: (_, listener) => { receive = listener; },
  postMessage: message => answer(message),
});
vm.runInNewContext(fs.readFileSync(path.join(workers, script), "utf8"), scope);
const ask = message => new Promise((resolve, reject) => {
  answer = resolve;
  Promise.resolve(receive({ data: message })).catch(reject);
});
const [SETUP, QUERY] = [0, 2];
(async () => {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
  await ask({ type: SETUP, data: { ...index, options: { suggest: false } } });
  const found = [];
  for (const question of questions) {
    const { data } = await ask({ type: QUERY, data: question });
    found.push(data.items.map(sections => sections[0].location));
  }
  console.log(JSON.stringify(found));
})();
