// The timeline of an episode: its lanes, and how they are drawn and read. The methods are those of the component in episode_view.js.

import {brief} from "shown_values";

export const COLORS = {policy: "#787c84", human: "#e87722", demo: "#3478d2", random: "#9650b4"};
const LINES = ["#2f6fde", "#d1495b", "#17946b", "#b8860b", "#8c5fc7", "#00889b", "#c2571a", "#5b6b7f"];
const DARK_LINES = ["#7fabff", "#ff8f9c", "#5fd39f", "#f0c65a", "#c5a3ff", "#5fd0e0", "#ff9d5c", "#a9b6c8"];
const HEIGHT = {who: 16, flag: 14, number: 54, chunk: 74};
const OPEN_LANES = 8;
const number = (value) => (typeof value === "number" ? value : NaN);

export const timeline = {
  line(i) { return (this.dark ? DARK_LINES : LINES)[i % LINES.length]; },
  // The range of a lane, of its finite numbers.
  scale(lane) {
    let [low, high] = [Infinity, -Infinity];
    for (const part of lane.values) for (const value of part) {
      if (typeof value === "number") { if (value < low) low = value; if (value > high) high = value; }
    }
    if (low > high) [low, high] = [0, 1];
    return {low, high: high === low ? low + 1 : high};
  },
  opened(lane) {
    if (lane.name in this.lanesOpen) return this.lanesOpen[lane.name];
    if (["rewards", "latency"].includes(lane.name)) return true;
    return this.episodes.some((one) => one.lanes.lanes.filter((other) => this.tells(other)).slice(0, OPEN_LANES).some((other) => other.name === lane.name));
  },
  // Whether a lane is worth its place unasked: flags that are never set, and constants, are not.
  tells(lane) { return lane.kind === "flag" ? lane.values.some((part) => part.includes(true)) : lane.values.some((part) => part.some((value) => value !== part[0])); },
  open(lane) {
    this.lanesOpen = {...this.lanesOpen, [lane.name]: !this.opened(lane)};
    this.$nextTick(() => this.draw());
  },
  shownLanes(one) { return [one.who, ...one.lanes.lanes.filter((lane) => this.opened(lane))]; },
  // A lane in words, for those who do not see it; the numbers of a step are in the table below.
  describe(one, lane) {
    if (lane.kind === "who") {
      const values = one.lanes.source, share = (name) => values.filter((value) => one.lanes.sources[value] === name).length / Math.max(1, values.length);
      const shares = Object.keys(COLORS).filter(share).map((name) => `${this.w("episodes." + name)} ${Math.round(100 * share(name))}%`).join(", ");
      const marks = one.lanes.marks.map(([step, name]) => `${name} ${step}`).join(", ");
      return `${lane.label}: ${shares}` + (marks ? "; " + this.f("episode.marks", {marks}) : "");
    }
    if (lane.kind === "flag") {
      const steps = lane.values[0].flatMap((value, step) => (value ? [step] : []));
      return `${lane.label}: ${steps.length ? this.f("episode.lane_steps", {steps: steps.slice(0, 5).join(", ")}) : "–"}`;
    }
    const finite = lane.values.flat().filter((value) => typeof value === "number");
    const values = finite.length ? `${brief(lane.low)} … ${brief(lane.high)}` : "–";
    return `${lane.label}${lane.unit ? ` (${lane.unit})` : ""}: ${values}`;
  },
  height: (lane) => HEIGHT[lane.kind],
  reading(lane) {
    if (lane.kind === "who" || lane.kind === "flag" || lane.parts.length > 1) return "";
    const value = lane.values[0][Math.min(this.step, lane.values[0].length - 1)];
    return typeof value === "number" ? brief(value) : value ?? "–";
  },
  cursor(one) { return `calc(var(--names) + (100% - var(--names)) * ${Math.min(this.step, one.lanes.steps) / Math.max(1, one.lanes.steps)})`; },
  grab(event, one) {
    event.currentTarget.querySelector(".cursor").focus({preventScroll: true});
    event.currentTarget.setPointerCapture(event.pointerId);
    this.moving = one;
    this.playing = 0;
    this.drag(event, one);
  },
  drag(event, one) {
    if (this.moving !== one) return;
    const canvas = event.currentTarget.querySelector("canvas").getBoundingClientRect();
    this.seek(((event.clientX - canvas.x) / canvas.width) * one.lanes.steps);
  },
  draw() {
    this.dark = document.body.classList.contains("body--dark");
    for (const one of this.episodes) for (const lane of this.shownLanes(one)) this.paint(one, lane);
  },
  paint(one, lane) {
    const canvas = lane.canvas;
    if (!canvas?.isConnected) return;
    const ratio = window.devicePixelRatio || 1, [width, height] = [canvas.clientWidth, HEIGHT[lane.kind]];
    if (canvas.width !== Math.round(width * ratio)) [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    const pen = canvas.getContext("2d"), steps = one.lanes.steps, x = (step) => (step / Math.max(1, steps)) * width;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    if (lane.kind === "who") this.paintWho(pen, one, x, height);
    else if (lane.kind === "flag") this.paintFlags(pen, lane, x, height);
    else this.paintNumbers(pen, one, lane, x, width, height);
    pen.fillStyle = "#b3261e66";
    if (lane.name === "interval") for (const gap of one.lanes.gaps) pen.fillRect(x(gap), 0, Math.max(2, x(gap + 1) - x(gap)), height);
    if (this.ranged) {
      pen.fillStyle = this.dark ? "#0f131aaa" : "#f6f7f9aa";
      pen.fillRect(0, 0, x(this.into), height);
      pen.fillRect(x(this.lastKept + 1), 0, width, height);
    }
  },
  paintWho(pen, one, x, height) {
    const values = one.lanes.source;
    for (let from = 0, to = 1; from < values.length; from = to++) {
      while (to < values.length && values[to] === values[from]) to++;
      pen.fillStyle = COLORS[one.lanes.sources[values[from]]];
      pen.fillRect(x(from), 2, x(to) - x(from), height - 4);
    }
    pen.font = "600 10px Roboto, sans-serif";
    for (const [step, name] of one.lanes.marks) {
      pen.fillStyle = this.dark ? "#ffffff" : "#1b2230";
      pen.fillRect(x(step), 0, 2, height);
      pen.fillStyle = "#ffffff";
      pen.fillText(name, x(step) + 4, height - 5);
    }
  },
  paintFlags(pen, lane, x, height) {
    pen.fillStyle = (this.dark ? DARK_LINES : LINES)[0];
    for (const part of lane.values) part.forEach((value, step) => value && pen.fillRect(x(step), 2, Math.max(3, x(step + 1) - x(step)), height - 4));
  },
  paintNumbers(pen, one, lane, x, width, height) {
    const y = (value) => height - 4 - ((value - lane.low) / (lane.high - lane.low)) * (height - 8), colors = this.dark ? DARK_LINES : LINES;
    pen.strokeStyle = this.dark ? "#2b3442" : "#dfe3e9";
    if (lane.low < 0 && lane.high > 0) { pen.beginPath(); pen.moveTo(0, y(0)); pen.lineTo(width, y(0)); pen.stroke(); }
    if (lane.kind === "chunk") return this.paintChunks(pen, one, lane, x, y, colors);
    lane.values.forEach((part, i) => {
      pen.strokeStyle = colors[i % colors.length];
      pen.lineWidth = 1.3;
      pen.beginPath();
      let gap = true;
      part.forEach((value, step) => {
        if (typeof value !== "number") { gap = true; return; }
        // a value holds until the next step
        gap ? pen.moveTo(x(step), y(value)) : pen.lineTo(x(step), y(value));
        pen.lineTo(x(step + 1), y(value));
        gap = false;
      });
      pen.stroke();
    });
  },
  // What was carried out as lines, and the plan that the policy had at the cursor, whole, with dots.
  paintChunks(pen, one, lane, x, y, colors) {
    const size = lane.chunk, wide = lane.parts.length / size, steps = one.lanes.steps;
    const executed = one.lanes.lanes.find((other) => other.name === "executed")?.values[0];
    const done = (step) => Math.max(1, Math.min(size, executed ? executed[step] : size));
    for (let part = 0; part < wide; part++) {
      pen.strokeStyle = pen.fillStyle = colors[part % colors.length];
      pen.lineWidth = 1.3;
      pen.beginPath();
      for (let step = 0, begun = false; step < steps; step++) for (let k = 0; k < done(step); k++) {
        const value = number(lane.values[k * wide + part][step]), place = x(step + k / done(step));
        if (Number.isNaN(value)) begun = false;
        else { begun ? pen.lineTo(place, y(value)) : pen.moveTo(place, y(value)); begun = true; }
      }
      pen.stroke();
      const at = this.at(one);
      pen.lineWidth = 2;
      pen.setLineDash([4, 2]);
      pen.beginPath();
      for (let k = 0; k < size; k++) {
        const [place, value] = [x(at + k / done(at)), y(number(lane.values[k * wide + part][at]))];
        k ? pen.lineTo(place, value) : pen.moveTo(place, value);
        pen.fillRect(place - 1.5, value - 1.5, 3, 3);
      }
      pen.stroke();
      pen.setLineDash([]);
    }
  },
};
