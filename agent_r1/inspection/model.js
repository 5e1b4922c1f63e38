"use strict";
// What the page knows: episodes with their tokens, as agent_r1/inspection/viewer.py packs them. Nothing here draws.

const ORDER = { before: 0, training: 1, demonstration: 1, after: 2 };
const SAMPLED = 1; // records.Source
const NUMBERS = ["logprobs", "gap", "advantages", "values", "targets", "drift"];
const FIRST_LETTER = 93; // payload.Table: letters stand for places, without the surrogates
const AFTER_SURROGATES = 0xe000;
const SURROGATES = 0x800;

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return prepare(JSON.parse(await new Response(stream).text()));
}

function prepare(data) {
  for (const episode of data.episodes) {
    episode.question = data.questions[episode.question];
    const tokens = spelled(episode.tokens, data.tokens);
    episode.ids = tokens.map(([id]) => id);
    episode.pieces = tokens.map(([, piece]) => piece);
    episode.source = expand(episode.source);
    episode.loss = episode.loss && expand(episode.loss);
    for (const key of NUMBERS) if (key in episode) episode[key] = perToken(spelled(episode[key], data.numbers), episode.source);
    episode.surprise = episode.logprobs.map((value) => value && -value);
    episode.failures = Object.keys(data.failures ?? {}).filter((kind) => data.failures[kind].includes(episode.id));
  }
  data.episodes.sort(chronologically);
  data.episodes.forEach((episode, place) => {
    episode.place = place;
    (episode.question.episodes ??= []).push(episode);
  });
  for (const episode of data.episodes) episode.twins = episode.question.episodes.filter((other) => other !== episode);
  return data;
}

function expand(runs) {
  const values = [];
  for (let at = 0; at < runs.length; at += 2) {
    for (let times = runs[at + 1]; times > 0; times--) values.push(runs[at]);
  }
  return values;
}

function spelled(letters, table) {
  return Array.from(letters, (letter) => {
    const code = letter.codePointAt(0);
    return table[code - FIRST_LETTER - (code < AFTER_SURROGATES ? 0 : SURROGATES)];
  });
}

// Numbers of the sampled tokens become numbers of all, 0 for the others.
function perToken(numbers, source) {
  if (numbers.length === source.length) return numbers;
  let next = 0;
  return source.map((where) => (where === SAMPLED ? numbers[next++] : 0));
}

function chronologically(one, other) {
  return ORDER[one.when] - ORDER[other.when] || one.iteration - other.iteration;
}

// The trajectory to read beside another one: the latest of the same question, or beside that one the earliest.
function usualTwin(episode) {
  const last = episode.twins.at(-1);
  return last && chronologically(last, episode) >= 0 ? last : episode.twins[0];
}

function whenText(episode) {
  if (episode.when === "demonstration") return `demonstration, iteration ${episode.iteration}`;
  return episode.when === "training" ? `iteration ${episode.iteration}` : `${episode.when} training`;
}

function text(episode) {
  episode.lower ??= episode.pieces.map((piece) => piece.toLowerCase());
  return (episode.whole ??= episode.lower.join(""));
}

// Places of the tokens in which some words stand.
function found(episode, words) {
  const places = new Set();
  if (!words) return places;
  const whole = text(episode);
  const hits = [];
  for (let at = whole.indexOf(words); at >= 0; at = whole.indexOf(words, at + words.length)) hits.push(at);
  let start = 0;
  episode.lower.forEach((piece, place) => {
    const stop = start + piece.length;
    if (hits.some((hit) => hit < stop && start < hit + words.length)) places.add(place);
    start = stop;
  });
  return places;
}

const FILTERS = [
  { key: "when", name: "When", of: (episode) => [whenText(episode)] },
  { key: "right", name: "Answer", of: (episode) => [verdictOf(episode)] },
  { key: "outcome", name: "Outcome", of: (episode) => [episode.outcome] },
  { key: "stratum", name: "Stratum", of: (episode) => Object.entries(episode.question.strata).map((one) => one.join(" ")) },
  { key: "call", name: "A tool call", of: (episode) => [...new Set(calls(episode))] },
  { key: "kind", name: "Went wrong", of: (episode) => episode.failures },
  { key: "change", name: "Same question", of: changes },
];

// An aborted episode, or an imported one without a reward, has no score.
function verdictOf(episode) {
  if (episode.right === null) return "not scored";
  return episode.right ? "right" : "wrong";
}

function markOf(episode) {
  return { right: "✓", wrong: "✗", "not scored": "–" }[verdictOf(episode)];
}

function calls(episode) {
  const statuses = episode.steps.flatMap((step) => step.calls.map((call) => call.status));
  return statuses.length ? statuses : ["no call"];
}

// How the answer differs from that of the earliest or latest trajectory of the same question.
function changes(episode) {
  if (!episode.twins.length) return ["asked once"];
  const all = episode.question.episodes; // in time
  const [first, last] = [verdictOf(all[0]), verdictOf(all.at(-1))];
  return ["asked again", first === last ? `stays ${last}` : `${first}, then ${last}`];
}

const SORTS = [
  { name: "in time", by: (one, other) => one.place - other.place },
  { name: "by question", by: (one, other) => compare(one.question.text, other.question.text) || one.place - other.place },
  { name: "lowest return", by: (one, other) => one.return - other.return },
  { name: "most steps", by: (one, other) => other.steps.length - one.steps.length },
  { name: "most tokens", by: (one, other) => other.ids.length - one.ids.length },
  { name: "widest gap", by: (one, other) => widest(other.gap) - widest(one.gap) },
];

function compare(one, other) {
  return one < other ? -1 : Number(one > other);
}

function widest(values) {
  return (values ?? []).reduce((most, value) => Math.max(most, Math.abs(value)), -1);
}

function chosen(episodes, filters) {
  const low = filters.low === "" ? -Infinity : Number(filters.low);
  const high = filters.high === "" ? Infinity : Number(filters.high);
  const kept = episodes.filter(
    (episode) =>
      episode.return >= low &&
      episode.return <= high &&
      FILTERS.every(({ key, of }) => !filters[key] || of(episode).includes(filters[key])) &&
      (!filters.search || `${text(episode)}\n${episode.question.text.toLowerCase()}`.includes(filters.search)),
  );
  return kept.sort(SORTS[filters.sort].by);
}
