"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const keyOf = (cell) => {
    if ("value" in cell.dataset) return Number(cell.dataset.value);
    return cell.textContent.trim();
  };
  const isEmpty = (key) => key === "" || key === "–" || Number.isNaN(key);
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b
    : String(a).localeCompare(String(b), undefined, { numeric: true }));

  const sortBy = (table, column, way) => {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [keyOf(row.cells[column]), row]);
    rows.sort(([a], [b]) => (isEmpty(a) || isEmpty(b) ? isEmpty(a) - isEmpty(b) : way * compare(a, b)));
    body.append(...rows.map(([, row]) => row));  // what is undefined stays last, whichever way
  };
  for (const table of all("table[data-sortable]")) {
    if (table.tBodies[0].rows.length < 2) continue;
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (head.textContent.trim() === "") return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const first = head.classList.contains("figure") ? "descending" : "ascending";
        const other = first === "descending" ? "ascending" : "descending";
        const way = head.getAttribute("aria-sort") === first ? other : first;
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", way);
        sortBy(table, column, way === "ascending" ? 1 : -1);
      });
    });
  }

  const typed = (input, act) => {
    let waiting;
    input.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(act, 120); });
  };
  for (const figure of all("figure[data-filtered]")) {
    const rows = [...figure.querySelector("tbody").rows];
    const label = document.createElement("label");
    const input = document.createElement("input");
    const count = document.createElement("output");
    input.type = "search";
    count.setAttribute("aria-live", "polite");
    label.append("rows with ", input);
    const controls = document.createElement("p");
    controls.className = "controls";
    controls.append(label, count);
    figure.querySelector("summary").after(controls);
    typed(input, () => {
      const words = input.value.toLowerCase();
      let shown = 0;
      for (const row of rows) {
        row.hidden = !row.textContent.toLowerCase().includes(words);
        shown += !row.hidden;
      }
      count.textContent = `${shown} of ${rows.length}`;
    });
  }

  for (const part of all("[data-pairs]")) {
    const form = part.querySelector("form");
    const pairs = all(".pair", part);
    const choices = all("select", form);
    const words = form.querySelector("[data-filter-words]");
    const count = form.querySelector("output");
    const button = form.querySelector("[data-show-all]");
    let most = 20;  // the worst are on top; a reader asks for more
    const show = () => {
      const wanted = words.value.toLowerCase();
      let found = 0;
      for (const pair of pairs) {
        const fits = choices.every((each) => each.selectedIndex === 0 || pair.dataset[each.dataset.filter] === each.value)
          && (wanted === "" || pair.textContent.toLowerCase().includes(wanted));
        found += fits;
        pair.hidden = !fits || found > most;
      }
      count.textContent = `${Math.min(found, most)} of ${pairs.length} shown`;
      button.hidden = found <= most;
    };
    button.addEventListener("click", () => { most = Infinity; show(); });
    addEventListener("beforeprint", () => { most = Infinity; show(); });
    form.hidden = false;
    form.addEventListener("submit", (event) => event.preventDefault());
    choices.forEach((each) => each.addEventListener("change", show));
    typed(words, show);
    show();
  }

  addEventListener("beforeprint", () => all("details.fold").forEach((each) => { each.open = true; }));

  const theme = document.querySelector("[data-theme-switch]");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
