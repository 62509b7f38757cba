"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const named = (id) => document.getElementById(id);
  const words = (text) => (text || "").split(" ").filter(Boolean);
  const linked = all("[data-ids]").map((element) => ({
    element,
    ids: words(element.dataset.ids),
    own: words(element.dataset.own ?? element.dataset.ids),
  }));
  const entries = all(".entry");
  const scopes = all(".scope");

  // one click lights everything about the same entries, and brings the first of each pane into view
  function select(ids) {
    const chosen = new Set(ids);
    for (const each of linked) each.element.classList.toggle("lit", each.own.some((id) => chosen.has(id)));
    const drawn = scopes.filter((scope) => scope.querySelector(".call.lit"));
    if (drawn.length && drawn.every((scope) => scope.hidden)) show(drawn[0].dataset.scope);
    for (const row of all("#modules .lit")) open(row);
    for (const pane of all(".pane")) reveal(pane);
  }

  function open(row) {
    for (let around = row.parentElement; around; around = around.parentElement) {
      if (around.tagName === "DETAILS") around.open = true;
    }
  }

  function reveal(pane) {
    const first = [...pane.querySelectorAll(".lit")].find((each) => each.getClientRects().length);
    if (!first) return;
    const box = first.getBoundingClientRect(), frame = pane.getBoundingClientRect();
    const isSeen = box.top > frame.top + 30 && box.bottom < frame.bottom && box.left >= frame.left && box.right <= frame.right;
    if (isSeen) return;
    pane.scrollTop += box.top - frame.top - frame.height / 3;
    const isAside = box.left < frame.left || box.right > frame.right;
    if (isAside && first.closest("svg")) pane.scrollLeft += box.left - frame.left - frame.width / 3;
  }

  function show(number) {
    for (const scope of scopes) scope.hidden = scope.dataset.scope !== number;
    scopes.filter((scope) => !scope.hidden).forEach(start);
  }

  // wide graphs begin with their first launch, not with their left end
  function start(scope) {
    for (const pane of all(".pane", scope)) {
      const first = pane.querySelector(".call");
      if (first) pane.scrollLeft += first.getBoundingClientRect().left - pane.getBoundingClientRect().left - pane.clientWidth / 3;
    }
  }

  // entries that pass all filters; what is about none of them fades
  function filter() {
    const rule = named("rule").value, layer = named("layer").value, least = Number(named("least").value) || 0;
    const isFree = !rule && !layer && !least;
    const passed = new Set();
    for (const entry of entries) {
      const data = entry.dataset;
      const isIn = (!rule || data.rule === rule) && (!layer || words(data.scopes).includes(layer)) && Number(data.us) >= least;
      if (isIn) passed.add(entry.id);
    }
    for (const each of linked) each.element.classList.toggle("off", !isFree && !each.ids.some((id) => passed.has(id)));
    for (const group of all(".group")) {
      const inside = all(".entry", group), count = group.querySelector("summary i");
      if (inside.length) count.textContent = inside.filter((entry) => !entry.classList.contains("off")).length;
    }
    if (layer) show(layer);
  }

  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-ids]");
    if (target) select(words(target.dataset.ids));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") select([]);
    const entry = event.target.closest?.(".entry");
    if (entry && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      select([entry.id]);
    }
  });
  named("filters").addEventListener("input", filter);
  named("filters").addEventListener("submit", (event) => event.preventDefault());
  named("filters").addEventListener("reset", () => setTimeout(filter));

  const root = document.documentElement;
  const asked = matchMedia("(prefers-color-scheme: dark)");
  const dress = () => { root.dataset.theme = root.dataset.chosen || (asked.matches ? "dark" : "light"); };
  asked.addEventListener("change", dress);
  named("theme").addEventListener("click", () => {
    root.dataset.chosen = root.dataset.theme === "dark" ? "light" : "dark";
    dress();
  });
  dress();
  scopes.filter((scope) => !scope.hidden).forEach(start);
})();
