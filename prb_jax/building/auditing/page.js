"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const UNKNOWN = "unknown";
  const SIDES = ["a", "b"];
  let about, token, invitation, task = null, marked = 0, busy = false;
  let drafting, draftWaits = false;

  // Texts are only ever set as text, and control characters are shown, not obeyed.
  const visible = (text) => text.replace(/\r\n/g, "\n").replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f]/g,
    (found) => `\\x${found.charCodeAt(0).toString(16).padStart(2, "0")}`);
  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const textBlock = (text, more = "") => element("div", { className: `text ${more}`, dir: "auto", textContent: visible(text) });

  const say = (message, bad = false) => {
    const status = byId("status");
    status.classList.toggle("bad", bad);
    if (status.textContent !== message) status.textContent = message;
  };
  const wait = (seconds) => new Promise((done) => { setTimeout(done, 1000 * seconds); });

  class Refused extends Error {
    constructor(status, message) { super(message); this.status = status; }
  }
  const ask = async (path, body) => {
    const headers = { "Content-Type": "application/json" };
    if (token) headers.Authorization = `Bearer ${token}`;
    const options = body === undefined ? {} : { method: "POST", headers, body: JSON.stringify(body), keepalive: true };
    const answer = await fetch(path, { ...options, cache: "no-store", redirect: "error" });
    const found = await answer.json();
    if (answer.ok) return found;
    throw new Refused(answer.status, found.error.message);
  };
  // A server that is away or busy is asked again; nothing that was answered on this page is lost meanwhile.
  const askUntilAnswered = async (path, body) => {
    for (let seconds = 0.5; ; seconds = Math.min(2 * seconds, 8)) {
      try {
        return await ask(path, body);
      } catch (error) {
        if (error instanceof Refused && error.status < 500) throw error;
        say(error instanceof Refused ? error.message
          : "The server does not answer. Your answers are kept on this page, and sent when it does.", true);
        await wait(seconds);
      }
    }
  };

  const groups = () => [...document.querySelectorAll("#task fieldset")].filter((each) => each.checkVisibility());
  const radios = (group) => [...group.querySelectorAll("input")];
  const chosen = (group) => radios(group).find((each) => each.checked)?.value ?? null;
  const rating = (value) => (value === null || value === UNKNOWN ? value : Number(value));
  const answer = () => {
    const quality = {};
    for (const criterion of about.criteria) {
      quality[criterion] = Object.fromEntries(SIDES.map((side) => [side, rating(chosen(byId(`${criterion}-${side}`)))]));
    }
    return { quality, fit: chosen(byId("fit-choice")), comment: byId("comment").value };
  };
  const mark = (index) => {
    const all = groups();
    marked = Math.max(0, Math.min(index, all.length - 1));
    all.forEach((each, place) => each.classList.toggle("marked", place === marked));
  };
  const focusGroup = (index) => {
    mark(index);
    const all = radios(groups()[marked]);
    (all.find((each) => each.checked) ?? all[0]).focus();
  };
  const showPersonal = () => {
    const rated = [...byId("quality").children].every((group) => chosen(group) !== null);
    const news = rated && byId("personal").hidden;
    if (rated) byId("personal").hidden = false;
    return news;
  };

  const keepDraft = () => {
    draftWaits = true;
    clearTimeout(drafting);
    drafting = setTimeout(sendDraft, 300);
  };
  const sendDraft = async () => {
    clearTimeout(drafting);
    if (!draftWaits || task === null || busy) return;
    draftWaits = false;
    try {
      await ask("/api/draft", { task, answer: answer() });
      if (!draftWaits) say("Kept.");
    } catch (error) {
      if (error instanceof Refused && error.status < 500) { refused(error); return; }
      draftWaits = true;
      say("The server does not answer. Your answers are kept on this page, and sent when it does.", true);
      drafting = setTimeout(sendDraft, 2000);
    }
  };

  const radioGroup = (id, legend, values) => {
    const group = element("fieldset", { id }, element("legend", { textContent: legend }));
    for (const [value, label] of values) {
      const input = element("input", { type: "radio", name: id, value: String(value) });
      group.append(element("label", {}, input, element("span", { textContent: label })));
    }
    group.addEventListener("focusin", () => mark(groups().indexOf(group)));
    group.addEventListener("change", () => {
      keepDraft();
      if (showPersonal()) say("Part 2: which one fits this person?");
    });
    return group;
  };
  const buildForm = () => {
    const points = [...about.points.map((each) => [each, String(each)]), [UNKNOWN, "can't tell"]];
    for (const criterion of about.criteria) {
      for (const side of SIDES) {
        const name = `${criterion[0].toUpperCase()}${criterion.slice(1)} of ${side.toUpperCase()}`;
        byId("quality").append(radioGroup(`${criterion}-${side}`, name, points));
      }
    }
    const choices = [["a", "A"], ["b", "B"], [UNKNOWN, "can't tell"]];
    byId("fit").append(radioGroup("fit-choice", "The response that fits this person better", choices));
    byId("comment").maxLength = about.longest_comment;
    byId("name").maxLength = about.longest_name;
  };

  const scrolled = (label, content) => {
    const region = element("div", { className: "long", tabIndex: 0, role: "region" }, content);
    region.setAttribute("aria-label", label);
    return [element("h3", { textContent: label }), region];
  };
  const fillPerson = (item) => {
    const parts = [];
    if (item.narrative) parts.push(element("h3", { textContent: "What the person wants" }), textBlock(item.narrative));
    if (item.aspects.length) {
      const list = element("dl");
      for (const each of item.aspects) {
        list.append(element("dt", { dir: "auto", textContent: visible(each.aspect) }));
        for (const text of [each.evidence, each.reason]) if (text) list.append(element("dd", {}, textBlock(text)));
      }
      parts.push(element("h3", { textContent: "What matters to the person" }), list);
    }
    if (item.profile.length) {
      const list = element("ol");
      for (const post of item.profile) {
        const line = element("li");
        if (post.category) line.append(element("span", { dir: "auto", textContent: visible(post.category) }));
        line.append(textBlock(post.text));
        list.append(line);
      }
      parts.push(...scrolled("What the person wrote before", list));
    }
    if (!parts.length) parts.push(element("p", { textContent: "Nothing is known about this person." }));
    byId("person").replaceChildren(...parts);
  };
  const fillAnswer = (draft) => {
    byId("task").reset();
    for (const criterion of about.criteria) {
      for (const side of SIDES) {
        const value = draft?.quality[criterion][side] ?? null;
        for (const each of radios(byId(`${criterion}-${side}`))) each.checked = value !== null && each.value === String(value);
      }
    }
    for (const each of radios(byId("fit-choice"))) each.checked = each.value === (draft?.fit ?? "");
    byId("comment").value = draft?.comment ?? "";
  };
  const show = (found) => {
    task = found.task;
    draftWaits = false;
    byId("join").hidden = byId("no-link").hidden = true;
    byId("annotator").textContent = found.annotator;
    byId("progress").textContent = `${found.done} judged, up to ${found.left} more can be judged`;
    byId("undo").hidden = !found.can_undo;
    byId("task").hidden = task === null;
    byId("finished").hidden = task !== null;
    if (task === null) { byId("finished-head").focus(); return; }
    const { item } = found;
    byId("prompt").replaceChildren(...item.prompt.flatMap((each) => (
      item.prompt.length > 1 ? [element("h3", { textContent: visible(each.role) }), textBlock(each.content)] : [textBlock(each.content)])));
    byId("text-a").textContent = visible(item.a);
    byId("text-b").textContent = visible(item.b);
    fillPerson(item);
    fillAnswer(found.draft);
    byId("personal").hidden = true;
    showPersonal();
    const open = groups().findIndex((each) => chosen(each) === null);
    mark(open < 0 ? groups().length - 1 : open);
    byId("item-head").focus();
    scrollTo(0, 0);
  };

  const refused = async (error) => {
    if (error.status === 409) {
      say(error.message, true);
      await run(() => askUntilAnswered("/api/task", {}), error.message);
    } else if (error.status === 401) {
      leave(error.message);
    } else say(error.message, true);
  };
  // One request at a time changes what is shown.
  const run = async (work, message = "") => {
    busy = true;
    try {
      const found = await work();
      busy = false;
      show(found);
      say(message);
    } catch (error) {
      busy = false;
      if (!(error instanceof Refused)) throw error;
      await refused(error);
    }
  };
  const submit = () => {
    if (busy || task === null) return;
    const open = groups().findIndex((each) => chosen(each) === null);
    if (open >= 0) {
      focusGroup(open);
      say(`${groups()[open].querySelector("legend").textContent}: not answered yet.`, true);
      return;
    }
    clearTimeout(drafting);
    const sent = { task, answer: answer() };
    say("Submitting.");
    run(() => askUntilAnswered("/api/submit", sent), "Submitted. The next item:");
  };
  const undo = () => {
    if (busy || byId("undo").hidden) return;
    const before = draftWaits && task !== null ? { task, answer: answer() } : null;
    run(async () => {
      if (before) await askUntilAnswered("/api/draft", before);
      return askUntilAnswered("/api/undo", {});
    }, "Taken back: change the answer and submit it again.");
  };

  const leave = (message) => {
    token = undefined;
    sessionStorage.removeItem("token");
    task = null;
    byId("task").hidden = byId("finished").hidden = byId("undo").hidden = true;
    byId("join").hidden = !about.by_name;
    byId("no-link").hidden = about.by_name;
    say(message, Boolean(message));
    if (about.by_name) byId("name").focus();
  };
  const join = async () => {
    if (busy) return;
    busy = true;
    try {
      const found = await askUntilAnswered("/api/join", { name: byId("name").value, invitation });
      token = found.token;
      sessionStorage.setItem("token", token);
      await run(() => askUntilAnswered("/api/task", {}));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      say(error.message, true);
    } finally {
      busy = false;
    }
  };
  const toggleKeys = () => {
    const keys = byId("keys");
    keys.hidden = !keys.hidden;
    byId("keys-button").setAttribute("aria-expanded", String(!keys.hidden));
  };

  const choose = (value) => {
    const group = groups()[marked];
    const found = radios(group).find((each) => each.value === value);
    if (!found) return false;
    found.checked = true;
    found.dispatchEvent(new Event("change", { bubbles: true }));
    focusGroup(group.id === "fit-choice" ? marked : marked + 1);
    return true;
  };
  const pressed = (event) => {
    if (task === null || byId("task").hidden) return false;
    const { key } = event;
    if (key === "0") return choose(UNKNOWN);
    if (/^[1-9]$/.test(key)) return choose(key);
    if (key === "a" || key === "b") {
      const fit = groups().findIndex((each) => each.id === "fit-choice");
      if (fit < 0) return false;
      mark(fit);
      return choose(key);
    }
    if (key === "j" || key === "k") { focusGroup(marked + (key === "j" ? 1 : -1)); return true; }
    if (key === "c" && !byId("personal").hidden) { byId("comment").focus(); return true; }
    if (key === "Enter" && event.target.tagName !== "BUTTON" && event.target.tagName !== "A") { submit(); return true; }
    return false;
  };
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing) return;
    const typing = event.target === byId("comment") || event.target === byId("name");
    let done = false;
    if (typing) {
      if (event.target === byId("name")) return;
      if (event.key === "Escape") { focusGroup(groups().length - 1); done = true; }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { submit(); done = true; }
    } else if (!event.ctrlKey && !event.metaKey && !event.altKey) {
      if (event.key === "u") { undo(); done = true; } else if (event.key === "?") { toggleKeys(); done = true; } else done = pressed(event);
    }
    if (done) event.preventDefault();
  });

  const start = async () => {
    about = await askUntilAnswered("/api/about");
    document.title = `${about.title}: audit`;
    byId("title").textContent = about.title;
    buildForm();
    byId("comment").addEventListener("input", keepDraft);
    byId("task").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
    byId("join").addEventListener("submit", (event) => { event.preventDefault(); join(); });
    byId("undo").addEventListener("click", undo);
    byId("keys-button").addEventListener("click", toggleKeys);
    addEventListener("pagehide", sendDraft);
    document.addEventListener("visibilitychange", () => { if (document.visibilityState === "hidden") sendDraft(); });
    const given = new URLSearchParams(location.hash.slice(1));
    invitation = given.get("invitation") ?? sessionStorage.getItem("invitation") ?? undefined;
    if (invitation) sessionStorage.setItem("invitation", invitation);
    token = given.get("token") ?? sessionStorage.getItem("token") ?? undefined;
    if (given.has("token") || given.has("invitation")) history.replaceState(null, "", location.pathname);
    if (!token) { leave(""); return; }
    sessionStorage.setItem("token", token);
    await run(() => askUntilAnswered("/api/task", {}));
  };
  start();
})();
