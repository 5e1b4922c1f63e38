// Tokens as coloured text, and what their colours say.

const SOURCES = ["prompt", "sampled", "observation", "template"];
const COLOURINGS = [
  { key: "source", name: "source", labels: SOURCES, tells: "where a token came from" },
  { key: "loss", name: "loss mask", labels: ["not in the loss", "in the loss"], tells: "what the policy loss runs over" },
  { key: "advantages", name: "advantage", tells: "positive: made likelier" },
  { key: "gap", name: "sampler − learner", unit: "nats", tells: "log-probability" },
  { key: "surprise", name: "surprise", unit: "nats", oneSided: true, tells: "−log-probability of what was sampled" },
  { key: "values", name: "value", tells: "the critic's, of the state before the token" },
  { key: "drift", name: "sampler − reference", unit: "nats", tells: "log-probability" },
  { key: "none", name: "nothing", labels: [], tells: "" },
];
const OUTLIERS = 0.02; // the share of tokens that may be beyond the end of a colour scale

// The colourings for which the page holds numbers, with the scale that all episodes share.
function usableColourings(episodes) {
  return COLOURINGS.filter(({ key }) => key === "none" || episodes.some((episode) => episode[key])).map((colouring) => ({
    ...colouring,
    scale: colouring.labels ? 0 : scaleOf(episodes.flatMap((episode) => episode[colouring.key] ?? [])),
  }));
}

function scaleOf(values) {
  const sizes = Float64Array.from(values.filter(Boolean), Math.abs).sort();
  return sizes.length ? sizes[Math.floor((sizes.length - 1) * (1 - OUTLIERS))] : 1;
}

function paint(element, value, colouring) {
  if (colouring.labels) {
    element.dataset.is = `${colouring.key}-${value}`;
  } else if (value) {
    element.dataset.is = value > 0 && !colouring.oneSided ? "plus" : "minus";
    const strength = Math.min(1, Math.abs(value) / colouring.scale) ** 0.7;
    element.style.setProperty("--strength", `${Math.round(100 * strength)}%`);
  }
}

// Every token of a span as an element, its text as text. Line breaks at the span's ends show as a sign alone.
function tokenElements(episode, start, stop, colouring, hits) {
  const fragment = document.createDocumentFragment();
  const values = episode[colouring.key];
  let edge = true;
  let trailing = stop;
  while (trailing > start && !episode.pieces[trailing - 1].trim()) trailing--;
  for (let place = start; place < stop; place++) {
    const piece = episode.pieces[place];
    edge &&= !piece.trim();
    const element = document.createElement("span");
    element.className = `token${piece ? "" : " part"}${hits.has(place) ? " hit" : ""}`;
    element.dataset.place = place;
    const [line, ...lines] = piece.split("\n");
    element.append(line);
    for (const next of lines) element.append(node("i", "", "break"), (edge || place >= trailing ? "" : "\n") + next);
    if (values) paint(element, values[place], colouring);
    fragment.append(element);
  }
  return fragment;
}

function drawLegend(into, colouring) {
  into.replaceChildren();
  into.title = colouring.tells;
  if (colouring.labels) {
    colouring.labels.forEach((label, value) => into.append(swatch(value, colouring), node("span", label)));
    return;
  }
  const shares = colouring.oneSided ? [0, 0.1, 0.3, 0.6, 1] : [-1, -0.5, -0.1, 0, 0.1, 0.5, 1];
  into.append(node("span", colouring.oneSided ? "0" : signed(-colouring.scale)));
  shares.forEach((share) => into.append(swatch(share * colouring.scale, colouring)));
  into.append(node("span", [colouring.oneSided ? short(colouring.scale) : signed(colouring.scale), colouring.unit].filter(Boolean).join(" ")));
}

function swatch(value, colouring) {
  const element = node("i", "", "swatch");
  paint(element, value, colouring);
  return element;
}

// All that is known about one token, in a line.
function describe(episode, place) {
  const piece = episode.pieces[place];
  const sampled = episode.source[place] === SAMPLED;
  const said = [
    [piece ? JSON.stringify(piece) : "first bytes of the next character", `id ${episode.ids[place]}, token ${place}`],
    ["", SOURCES[episode.source[place]]],
  ];
  if (sampled) said.push(["log p", `${short(episode.logprobs[place])} (${Number((100 * Math.exp(episode.logprobs[place])).toPrecision(2))} %)`]);
  if (sampled && episode.gap) said.push(["gap", signed(episode.gap[place])]);
  if (episode.advantages) said.push(["advantage", signed(episode.advantages[place])]);
  if (episode.values) said.push(["value", `${signed(episode.values[place])} towards ${signed(episode.targets[place])}`]);
  if (sampled && episode.drift) said.push(["to reference", signed(episode.drift[place])]);
  if (episode.loss) said.push(["", episode.loss[place] ? "in the loss" : "not in the loss"]);
  return said;
}

function short(value) {
  if (value === null) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 0.001 || size >= 10000) return value.toExponential(1).replace("-", "−").replace("e-", "e−").replace("e+", "e");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

function signed(value) {
  return value > 0 ? `+${short(value)}` : short(value);
}

// What was cut short, or never graded, earned nothing that is known.
function earned(episode) {
  return episode.return === null ? "no return" : `return ${signed(episode.return)}`;
}

function node(tag, content = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = content;
  if (className) element.className = className;
  return element;
}
