// One trajectory as a conversation.

const NAMES = { thought: "thought", call: "tool call", answer: "answer", text: "says" };

function drawQuestion(into, question) {
  const gold = node("p", "", "gold");
  if (question.answers.length) gold.append(node("b", "gold "), question.answers.join("  or  "));
  const facts = [...strata(question), question.dataset, question.id];
  into.replaceChildren(node("h2", question.text), gold, node("p", facts.filter(Boolean).join(" · "), "quiet"));
}

function strata(question) {
  const { hops, kind, ...others } = question.strata;
  const counted = hops && `${hops} ${hops === "1" ? "hop" : "hops"}`;
  return [counted, kind, ...Object.entries(others).map(([name, value]) => `${name} ${value}`)];
}

function drawEpisode(episode, state) {
  const column = node("article", "", episode.question.drawn ? "column drawn" : "column");
  column.dataset.episode = episode.place;
  column.setAttribute("aria-label", whenText(episode));
  column.append(episodeHead(episode, state));
  const hits = found(episode, state.words);
  const first = episode.steps.length ? episode.steps[0].start : episode.ids.length;
  column.append(block("prompt", "prompt", episode, 0, first, state, hits, state.prompts));
  episode.steps.forEach((step, number) => column.append(drawStep(episode, step, number, state, hits)));
  const end = node("p", "", "ending");
  end.append(verdict(episode), node("b", episode.answer || "no answer"), node("span", episode.outcome.replaceAll("_", " "), "quiet"));
  column.append(end);
  return column;
}

function episodeHead(episode, state) {
  const head = node("header");
  const kept = episode.kept === false ? "filtered out" : "";
  const facts = [`${episode.steps.length} steps`, `${episode.ids.length} tokens`, `${episode.version} updates`, kept];
  head.append(
    verdict(episode),
    node("b", whenText(episode)),
    node("span", episode.answer || episode.outcome.replaceAll("_", " "), "said-answer"),
    node("span", earned(episode), "return"),
    node("span", facts.filter(Boolean).join(" · "), "quiet"),
  );
  if (!episode[state.colouring.key] && state.colouring.key !== "none") {
    head.append(node("span", `${state.colouring.name}: not known for this one`, "unknown"));
  }
  return head;
}

function verdict(episode) {
  const mark = node("span", markOf(episode), `mark ${episode.right === null ? "quiet" : verdictOf(episode)}`);
  mark.title = episode.right === null ? "not scored" : episode.question.words[episode.right ? 0 : 1];
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", mark.title);
  return mark;
}

function drawStep(episode, step, number, state, hits) {
  const section = node("section", "", "step");
  const head = node("h3");
  head.append(node("b", `Step ${number + 1}`));
  for (const call of step.calls) head.append(node("span", call.tool || "call"), status(call));
  if (step.stopped === "length") head.append(node("span", "cut off", "chip fault"));
  head.append(node("span", "", "fill"), ...rewards(step, state.weights));
  section.append(head);
  let at = step.start;
  for (const [kind, count] of step.parts) {
    section.append(block(kind, NAMES[kind], episode, at, at + count, state, hits, true));
    at += count;
  }
  if (at < step.stop) section.append(...replies(episode, at, step.stop, state, hits));
  return section;
}

// What came back; where the environment began a new context, its history apart.
function replies(episode, start, stop, state, hits) {
  const cut = episode.contexts.find((context) => start <= context && context < stop);
  if (cut === undefined) return [block("observation", "observation", episode, start, stop, state, hits, true)];
  const before = cut > start ? [block("observation", "observation", episode, start, cut, state, hits, true)] : [];
  return [...before, block("prompt", "new context", episode, cut, stop, state, hits, state.prompts)];
}

function status(call) {
  const failed = call.status !== "ok";
  const chip = node("span", failed ? call.status.replaceAll("_", " ") : "ok", failed ? "chip fault" : "chip fine");
  chip.title = `the tool took ${short(call.latency_ms)} ms`;
  return chip;
}

// The parts of a step's reward, then what they add up to by their weights.
function rewards(step, weights) {
  const parts = Object.entries(step.rewards).map(([name, value]) => {
    const weight = weights[name] ?? 0;
    const chip = node("span", `${name} ${signed(value)}`, weight ? "chip weighted" : "chip");
    chip.title = weight ? `weight ${weight}` : "weight 0: told, not rewarded";
    return chip;
  });
  const total = node("span", `reward ${signed(step.reward)}`, "chip total");
  return [...parts, total];
}

function block(kind, name, episode, start, stop, state, hits, open) {
  const details = node("details", "", `block ${kind}`);
  details.open = open;
  details.append(node("summary", name));
  const body = node("div", "", "tokens");
  details.append(body);
  const fill = () => body.replaceChildren(tokenElements(episode, start, stop, state.colouring, hits));
  if (open) fill();
  else details.addEventListener("toggle", () => body.childElementCount || fill());
  return details;
}
