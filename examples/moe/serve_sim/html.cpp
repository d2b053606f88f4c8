// SPDX-License-Identifier: Apache-2.0
// examples/moe/serve_sim/html.cpp: a page that draws the charts of a simulated run from the data inside it. It loads nothing.
#include <regex>

#include "examples/moe/serve_sim/serve_sim.hpp"

namespace moe_tool::serve_sim {
namespace {

constexpr char const* kHead = R"html(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>moe serve-sim</title>
<style>
:root { --paper: #fff; --ink: #1c2330; --soft: #667085; --rule: #dfe3ea; --before: #d9822b; --after: #2563a8; --mark: #98a2b3; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181f; --ink: #e6e9ef; --soft: #98a2b3; --rule: #2b323d; --before: #f0a45d; --after: #6aa5e3; --mark: #667085; }
}
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; }
h2 { font-size: 1rem; margin: 2rem 0 .3rem; }
p { margin: .2rem 0; color: var(--soft); }
.numbers { display: flex; flex-wrap: wrap; gap: 2rem; margin-top: 1rem; }
.numbers b { display: block; font-size: 1.6rem; font-weight: 600; color: var(--ink); }
svg { width: 100%; height: auto; display: block; overflow: visible; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.rule { stroke: var(--rule); }
.mark { stroke: var(--mark); stroke-dasharray: 4 3; }
@media (max-width: 40rem) { svg text { font-size: 20px; } }
.before { fill: var(--before); } .after { fill: var(--after); }
.line { fill: none; stroke: var(--after); stroke-width: 1.5; }
.key span { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; border-radius: 2px; }
</style>
</head>
<body>
<h1>moe serve-sim</h1>
<p id="about"></p>
<div class="numbers" id="numbers"></div>
<h2>Token-expert pairs of each rank in a mean step</h2>
<p class="key" id="key"></p>
<div id="ranks"></div>
<h2>Imbalance of each step: most loaded rank / mean</h2>
<p>A dashed line marks a rebalancing. 1 is perfect.</p>
<div id="imbalance"></div>
<div id="times"></div>
<script type="application/json" id="data">)html";

constexpr char const* kTail = R"html(</script>
<script>
"use strict";
const run = JSON.parse(document.getElementById("data").textContent);
const put = (id, text) => { document.getElementById(id).textContent = text; };
const W = 900, H = 240, LEFT = 56, RIGHT = 8, TOP = 10, BOTTOM = 28;

// A drawing of fixed size that scales with the page, with horizontal rules at round values from `low` to `high`.
function chart(id, low, high, label) {
  const draw = (name, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    svg.append(node);
    return node;
  };
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  document.getElementById(id).append(svg);
  const raw = (high - low) / 4, power = 10 ** Math.floor(Math.log10(raw));
  const gap = power * [1, 2, 2.5, 5, 10].find(f => f * power >= raw);
  const top = low + gap * Math.ceil((high - low) / gap - 1e-9);
  const y = value => TOP + (H - TOP - BOTTOM) * (top - value) / (top - low);
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(gap)) + (gap / power === 2.5 ? 1 : 0)));
  for (let value = low; value <= top + gap / 2; value += gap) {
    draw("line", {x1: LEFT, x2: W - RIGHT, y1: y(value), y2: y(value), class: "rule"});
    draw("text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, value.toFixed(digits));
  }
  return {draw, y};
}

// Every n-th label, n = 1, 2, 5, 10, 20, …, so that at most 16 are drawn.
const every = count => {
  const raw = Math.max(1, count / 16), power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find(f => f * power >= raw);
};

// Of any number of values: a call takes some 100,000 arguments at most.
const largest = (values, least) => values.reduce((most, value) => Math.max(most, value), least);

// The steps that a line is drawn through: all, or of many the least and the largest value of each unit of the drawing's width.
function drawn(values) {
  const n = values.length, columns = W - LEFT - RIGHT, steps = [];
  if (n <= 4 * columns) return values.map((_, step) => step);
  for (let column = 0; column < columns; ++column) {
    const begin = Math.floor(column * n / columns), end = Math.floor((column + 1) * n / columns);
    let low = begin, high = begin;
    for (let step = begin; step < end; ++step) {
      if (values[step] < values[low]) low = step;
      if (values[step] > values[high]) high = step;
    }
    steps.push(Math.min(low, high));
    if (low !== high) steps.push(Math.max(low, high));
  }
  return steps;
}

function bars() {
  const {before, after} = run;
  const {draw, y} = chart("ranks", 0, largest(after.rank_slots, largest(before.rank_slots, 1)), "load of each rank before and after");
  const wide = (W - LEFT - RIGHT) / run.ranks;
  for (let rank = 0; rank < run.ranks; ++rank) {
    [["before", before], ["after", after]].forEach(([name, side], i) => {
      const value = side.rank_slots[rank], bar = draw("rect", {class: name, x: LEFT + wide * (rank + .12 + .4 * i), width: wide * .36, y: y(value),
                                                               height: Math.max(0, y(0) - y(value)), rx: 1.5});
      const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
      title.textContent = `rank ${rank}, ${name}: ${value.toFixed(1)}`;
      bar.append(title);
    });
    if (rank % every(run.ranks) === 0) draw("text", {x: LEFT + wide * (rank + .5), y: H - 8, "text-anchor": "middle"}, rank);
  }
}

function series(id, values, low, label) {
  const high = largest(values, low + 1e-9);
  const {draw, y} = chart(id, low, high > low * 1.02 ? high : low + .1, label);
  const n = values.length, x = step => LEFT + (W - LEFT - RIGHT) * (n === 1 ? .5 : step / (n - 1));
  const marks = run.rebalanced_after.map(step => x(step + .5));
  marks.filter((at, i) => i === 0 || Math.floor(at) > Math.floor(marks[i - 1])).forEach(
    at => draw("line", {x1: at, x2: at, y1: TOP, y2: H - BOTTOM, class: "mark"}));
  draw("polyline", {class: "line", points: drawn(values).map(step => `${x(step)},${y(values[step])}`).join(" ")});
  for (let step = 0; step < n; step += every(n)) draw("text", {x: x(step), y: H - 8, "text-anchor": "middle"}, step);
}

put("about", `${run.experts} experts + ${run.replicas} replicas, top ${run.topk}, on ${run.ranks} ${run.computed ? "MPI" : "simulated"} ranks; ` +
             `${run.tokens_per_rank} tokens a rank and step; routing ${run.routing}; ${run.steps} steps; EPLB ${run.eplb}`);
for (const [value, what] of [[run.before.balancedness.toFixed(3), "balancedness before"], [run.after.balancedness.toFixed(3), "balancedness after"],
                             [run.rebalanced_after.length, "rebalancings"]]) {
  const part = document.createElement("p"), number = document.createElement("b");
  number.textContent = value;
  part.append(number, what);
  document.getElementById("numbers").append(part);
}
for (const name of ["before", "after"]) {
  const box = document.createElement("span");
  box.style.background = `var(--${name})`;
  const side = run[name];
  document.getElementById("key").append(box, `${name}: steps ${side.first_step} to ${side.last_step}`);
}
bars();
series("imbalance", run.imbalance, 1, "imbalance of each step");
if (run.step_ms) {
  const title = document.createElement("h2");
  title.textContent = "Milliseconds of each step: the slowest rank";
  document.getElementById("times").append(title);
  series("times", run.step_ms, 0, "time of each step");
}
</script>
</body>
</html>
)html";

}  // namespace

std::string as_html(Report const& report) {
  // Inside a script element only "<" could end the data.
  return kHead + std::regex_replace(as_json(report), std::regex("<"), "\\u003c") + kTail;
}

}  // namespace moe_tool::serve_sim
