// The page at work: what is chosen, what is shown, and how it is moved through.

const at = (id) => document.getElementById(id);
const WIDE = matchMedia("(min-width: 1100px)");

function start(data) {
  const colourings = usableColourings(data.episodes);
  const state = {
    filters: { search: "", low: "", high: "", sort: 0 },
    shown: [], // episodes in the list
    current: null, // the one that is read
    beside: "usual", // another one of its question: "usual", "" for none, or its place
    inspected: null, // the element of a token
    colouring: colourings[0],
    prompts: false,
    weights: data.weights,
    words: "",
  };
  if (!WIDE.matches) state.beside = "";

  drawFrame(data, colourings);
  follow();
  listen();
  document.documentElement.dataset.ready = "true";

  function drawFrame() {
    at("facts").append(...data.facts.flatMap(([label, value]) => [node("span", label, "quiet"), node("b", value)]));
    at("notes").append(...data.notes.map((note) => node("li", note)));
    for (const { key, name, of } of FILTERS) {
      state.filters[key] = "";
      at("selects").append(filterSelect(key, name, data.episodes.flatMap(of)));
    }
    const sort = labelled("Order", "sort", SORTS.map(({ name }, place) => [String(place), name]));
    at("selects").append(sort);
    at("colouring").append(...colourings.map(({ name }, place) => new Option(name, String(place))));
    at("more").open = matchMedia("(min-width: 700px)").matches;
    drawLegend(at("legend"), state.colouring);
  }

  // Sets the filters that the page's address names, such as #kind=turn+limit.
  function follow() {
    const named = new URLSearchParams(location.hash.slice(1));
    for (const { key } of FILTERS) if (named.has(key)) state.filters[key] = at(key).value = named.get(key);
    refilter();
    if (!state.shown.includes(state.current)) open(state.shown[0], { keepView: true });
  }

  function refilter() {
    state.words = state.filters.search;
    state.shown = chosen(data.episodes, state.filters);
    at("list").replaceChildren(...state.shown.map(row));
    const scored = state.shown.filter((episode) => episode.right !== null);
    const share = Math.round((100 * scored.filter((episode) => episode.right).length) / scored.length);
    at("count").textContent = `${state.shown.length} of ${data.episodes.length}, ${scored.length ? `${share} %` : "none"} right`;
    const active = [...FILTERS.map(({ key }) => key), "low", "high"].filter((key) => state.filters[key] !== "").length;
    at("active").textContent = active ? `(${active} active)` : "";
    at("reset").hidden = !active && !state.filters.search;
    markCurrent();
  }

  function open(episode, { keepView = false } = {}) {
    if (!episode) return;
    if (state.beside !== "") state.beside = "usual";
    state.current = episode;
    if (!keepView) document.body.dataset.view = "reading";
    drawTwins();
    redraw();
    at("scroll").scrollTop = 0;
    at("scroll").querySelector(".hit")?.scrollIntoView({ block: "center" });
    markCurrent();
  }

  function redraw() {
    const { current } = state;
    if (!current) return;
    const twin = state.beside === "usual" ? usualTwin(current) : current.twins.find((one) => String(one.place) === state.beside);
    const read = twin ? [current, twin].sort(chronologically) : [current];
    drawQuestion(at("question"), current.question);
    at("columns").replaceChildren(...read.map((episode) => drawEpisode(episode, state)));
    at("columns").dataset.count = read.length;
    inspect(null);
  }

  function drawTwins() {
    const { twins } = state.current;
    at("twins").hidden = !twins.length;
    const usual = usualTwin(state.current);
    const options = twins.map((one) => new Option(`⇄ ${whenText(one)} ${markOf(one)}`, String(one.place)));
    at("twin").replaceChildren(new Option("alone", ""), ...options);
    at("twin").value = state.beside === "usual" && usual ? String(usual.place) : state.beside;
  }

  function markCurrent() {
    const list = at("list");
    list.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    const row = state.current && list.querySelector(`[data-place="${state.current.place}"]`);
    list.setAttribute("aria-activedescendant", row ? row.id : "");
    row?.setAttribute("aria-selected", "true");
    row?.scrollIntoView({ block: "nearest" });
  }

  function move(by) {
    const place = state.shown.indexOf(state.current);
    open(state.shown[Math.max(0, Math.min(state.shown.length - 1, place + by))], { keepView: true });
  }

  function recolour(place) {
    if (!colourings[place]) return;
    state.colouring = colourings[place];
    at("colouring").value = String(place);
    drawLegend(at("legend"), state.colouring);
    redraw();
  }

  function setBeside(value) {
    state.beside = value;
    drawTwins();
    redraw();
  }

  function inspect(element) {
    state.inspected?.classList.remove("inspected");
    state.inspected = element;
    element?.classList.add("inspected");
    const column = element?.closest(".column");
    const said = column ? describe(data.episodes[Number(column.dataset.episode)], Number(element.dataset.place)) : [];
    const hint = WIDE.matches ? "Point at a token, or use ← and →, to see its numbers." : "Tap a token to see its numbers.";
    at("inspector").replaceChildren(
      ...(said.length ? said : [["", hint]]).map(([label, value]) => {
        const part = node("span", "", "said");
        if (label) part.append(node("b", label));
        part.append(node("span", value));
        return part;
      }),
    );
  }

  function step(by) {
    const tokens = [...at("columns").querySelectorAll("details[open] .token")];
    const place = tokens.indexOf(state.inspected);
    const element = tokens[place < 0 ? 0 : Math.max(0, Math.min(tokens.length - 1, place + by))];
    if (!element) return;
    inspect(element);
    element.scrollIntoView({ block: "nearest" });
  }

  function toggleTheme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  }

  function showList() {
    document.body.dataset.view = "list";
    markCurrent();
  }

  function clear() {
    for (const key of Object.keys(state.filters)) if (key !== "sort") state.filters[key] = "";
    for (const field of at("filters").elements) if (field.id !== "sort" && "value" in field) field.value = "";
    refilter();
    redraw();
  }

  function listen() {
    at("filters").addEventListener("submit", (event) => event.preventDefault());
    at("filters").addEventListener("input", ({ target }) => {
      state.filters[target.id] = target.id === "search" ? target.value.trim().toLowerCase() : target.value;
      refilter();
      if (target.id === "search") redraw();
    });
    at("list").addEventListener("click", ({ target }) => {
      const row = target.closest("[data-place]");
      if (row) open(data.episodes[Number(row.dataset.place)]);
    });
    at("scroll").addEventListener("pointerover", ({ target }) => target.matches(".token") && inspect(target));
    at("scroll").addEventListener("click", ({ target }) => target.matches(".token") && inspect(target));
    at("colouring").addEventListener("change", ({ target }) => recolour(Number(target.value)));
    at("twin").addEventListener("change", ({ target }) => setBeside(target.value));
    at("previous").addEventListener("click", () => move(-1));
    at("next").addEventListener("click", () => move(1));
    at("back").addEventListener("click", showList);
    at("reset").addEventListener("click", clear);
    at("theme").addEventListener("click", toggleTheme);
    at("about-button").addEventListener("click", () => at("about").showModal());
    document.addEventListener("keydown", onKey);
    addEventListener("hashchange", follow);
  }

  function onKey(event) {
    const typing = event.target.matches("input, select");
    if (event.ctrlKey || event.metaKey || event.altKey || at("about").open) return;
    if (event.key === "Escape") return typing ? event.target.blur() : showList();
    if (typing) return;
    const inList = event.target === at("list");
    const keys = {
      j: () => move(1),
      k: () => move(-1),
      ArrowRight: () => step(1),
      ArrowLeft: () => step(-1),
      c: () => state.current.twins.length && setBeside(at("twin").value ? "" : "usual"),
      p: () => {
        state.prompts = !state.prompts;
        redraw();
      },
      t: toggleTheme,
      "/": () => at("search").focus(),
      "?": () => at("about").showModal(),
      ...(inList && { ArrowDown: () => move(1), ArrowUp: () => move(-1), Enter: () => open(state.current) }),
    };
    const act = keys[event.key] ?? (/^[1-9]$/.test(event.key) ? () => recolour(Number(event.key) - 1) : null);
    if (!act) return;
    event.preventDefault();
    act();
  }
}

function row(episode) {
  const element = node("li", "", "row");
  element.id = `row-${episode.place}`;
  element.dataset.place = episode.place;
  element.setAttribute("role", "option");
  element.setAttribute("aria-selected", "false");
  const body = node("div");
  body.append(node("p", episode.question.text));
  const failed = episode.steps.flatMap((step) => step.calls).find((call) => call.status !== "ok");
  const [stratum] = strata(episode.question);
  const facts = [whenText(episode), stratum, `${episode.steps.length} steps`, earned(episode)];
  const line = node("p", facts.filter(Boolean).join(" · ").replace("1 steps", "1 step"), "quiet");
  if (failed) line.append(" ", node("span", failed.status.replaceAll("_", " "), "chip fault"));
  if (episode.outcome !== "answered") line.append(" ", node("span", episode.outcome.replaceAll("_", " "), "chip fault"));
  if (episode.twins.length) line.append(" ", node("span", "⇄", "pair"));
  body.append(line);
  element.append(verdict(episode), body);
  return element;
}

function filterSelect(key, name, found) {
  const counts = new Map();
  for (const value of found) counts.set(value, (counts.get(value) ?? 0) + 1);
  const numbered = (value) => Number(value.match(/\d+/)?.[0] ?? 0);
  const values = [...counts.keys()].sort((one, other) => numbered(one) - numbered(other) || compare(one, other));
  return labelled(name, key, [["", "any"], ...values.map((value) => [value, `${value.replaceAll("_", " ")} (${counts.get(value)})`])]);
}

function labelled(name, key, options) {
  const label = node("label", "");
  const select = node("select");
  select.id = key;
  select.append(...options.map(([value, shown]) => new Option(shown, value)));
  label.append(node("span", name), select);
  return label;
}

unpack(at("data").textContent).then(start);
