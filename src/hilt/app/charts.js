// The curves of runs, as a Vue component of NiceGUI's. It asks the server for points and draws them: all charts share one range and one cursor.

const PERIOD = 3000; // ms between two questions whether there is something new
const LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 24, HEIGHT = 200; // pixels around the curves, and of a chart
const BEYOND = 0.02; // of the range: so far behind its last point a curve still has a value
const MAX_READINGS = 8; // values beside the cursor of one chart; the legend has all of them
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3], [14, 4]];

// A number as an axis and a legend show it.
const short = (value, percent) => {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  if (percent) return `${(100 * value).toFixed(value > 0.1 || value === 0 ? 0 : 1)}%`;
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : `${+value.toPrecision(3)}`;
};

// Round numbers between two, about as many as asked for.
const ticks = (low, high, count) => {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? rough;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
};

// The place of the last x that is not beyond `at`; -1 before the first.
const before = (xs, at) => {
  let low = 0, high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= at) low = middle + 1; else high = middle;
  }
  return low - 1;
};

export default {
  template: `
  <section class="hilt-curves" :aria-label="words.curves">
    <div class="hilt-row">
      <h2>{{ words.curves }}</h2>
      <div class="hilt-choice" role="group" :aria-label="words.axis">
        <button v-for="one in ['step', 'minutes']" :key="one" type="button" class="hilt-button" :aria-pressed="axis === one" @click="choose(one)">{{ words[one] }}</button>
      </div>
      <label class="hilt-row">{{ words.smooth }} <input type="range" min="0" max="8" step="1" v-model.number="level" @change="ask(true)" :aria-valuetext="String(smooth)">
        <output>{{ smooth }}</output></label>
      <button v-if="zoom" type="button" class="hilt-button hilt-reset" @click="reset">{{ words.reset }}</button>
      <span class="hilt-soft" v-else>{{ words.hint }}</span>
      </div>
    <p class="hilt-alarm" v-if="problem" role="alert">{{ problem }}</p>
    <p v-if="asked && !charts.length && !problem" class="hilt-soft">{{ words.none }}</p>
    <div class="hilt-charts">
      <figure v-for="(chart, number) in charts" :key="chart.key" class="hilt-panel">
        <figcaption><strong>{{ chart.title }}</strong> <span class="hilt-soft">{{ chart.unit }}</span></figcaption>
        <canvas :ref="(element) => canvases[number] = element" tabindex="0" role="img" :aria-label="described(chart)"
          @pointerdown="down($event)" @pointermove="move($event)" @pointerup="up($event)" @pointerleave="leave" @dblclick="reset" @keydown="key($event)"></canvas>
        <ul><li v-for="(line, place) in chart.lines" :key="place"><i :style="mark(line)"></i>{{ named(line) }} <b>{{ valued(chart, line) }}</b></li></ul>
      </figure>
    </div>
  </section>`,
  props: {runs: Array, words: Object},
  data: () => ({charts: [], palette: [], darker: [], axis: "step", level: 4, stamp: "", zoom: null, cursor: null, drag: null, dark: false, asked: false, problem: "", canvases: []}),
  computed: {
    smooth() { return [1, 3, 5, 10, 20, 50, 100, 200, 500][this.level]; },
    range() {
      const xs = this.charts.flatMap((chart) => chart.lines.flatMap((line) => line.x.length ? [line.x[0], line.x.at(-1)] : []));
      const low = Math.min(...xs), high = Math.max(...xs);
      return this.zoom ?? [low, high > low ? high : low + 1];
    },
  },
  mounted() {
    this.$el.curves = this;
    this.themes = new MutationObserver(() => this.recolor());
    this.themes.observe(document.body, {attributes: true, attributeFilter: ["class"]});
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.$el);
    this.recolor();
    this.ask(true);
    this.timer = setInterval(() => { if (!document.hidden) this.ask(false); }, PERIOD);
  },
  unmounted() {
    clearInterval(this.timer);
    this.themes.disconnect();
    this.sizes.disconnect();
  },
  updated() { this.draw(); },
  methods: {
    short,
    async ask(anew) {
      const query = new URLSearchParams([...this.runs.map((run) => ["run", run]), ["axis", this.axis], ["smooth", this.smooth], ["stamp", anew ? "" : this.stamp]]);
      try {
        const answer = await fetch(`/api/curves?${query}`);
        if (!answer.ok) throw new Error((await answer.text()).slice(0, 300));
        const found = await answer.json();
        this.asked = true;
        if (found.same) return;
        this.problem = found.problems.join(" ");
        Object.assign(this, {charts: found.charts, palette: found.palette, darker: found.dark, stamp: found.stamp});
        this.$nextTick(this.draw);
      } catch (error) {
        this.problem = String(error.message ?? error);
      }
    },
    choose(axis) {
      if (axis !== this.axis) Object.assign(this, {axis, zoom: null, cursor: null});
      this.ask(true);
    },
    reset() { this.zoom = null; this.draw(); },
    recolor() { this.dark = document.body.classList.contains("body--dark"); this.$nextTick(this.draw); },
    color(line) { const known = this.dark ? this.darker : this.palette; return `#${known[line.color % known.length] ?? "888888"}`; },
    mark(line) {
      const color = this.color(line);
      return line.dots ? {background: color, borderRadius: "50%", height: "9px", width: "9px"}
        : line.dash ? {background: `repeating-linear-gradient(90deg, ${color} 0 5px, transparent 5px 8px)`} : {background: color};
    },
    named: (line) => [line.whose, line.name].filter(Boolean).join(": "),
    valued(chart, line) {
      const place = this.placed(line);
      return place < 0 ? "–" : short(line.y[place], chart.percent);
    },
    // The point of a curve that is read: the last one that is not beyond the cursor, -1 where there is none. A curve that has ended long before has none.
    placed(line) {
      const last = line.x.length - 1;
      if (this.cursor === null || last < 0) return last;
      const far = this.cursor - line.x[last] > BEYOND * (this.range[1] - this.range[0]);
      return far && !line.dots ? -1 : before(line.x, this.cursor);
    },
    // The cursor itself, as the axis shows it.
    where() { return this.axis === "step" ? Math.round(this.cursor).toLocaleString() : `${+this.cursor.toPrecision(3)}`; },
    described(chart) { return `${chart.title}. ` + chart.lines.map((line) => `${this.named(line)} ${this.valued(chart, line)}`).join(", "); },
    x(event) {
      const box = event.target.getBoundingClientRect(), [low, high] = this.range;
      const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
      return low + Math.max(0, Math.min(1, share)) * (high - low);
    },
    down(event) { this.drag = [this.x(event), this.x(event)]; event.target.setPointerCapture(event.pointerId); },
    move(event) {
      this.cursor = this.x(event);
      if (this.drag) this.drag[1] = this.cursor;
    },
    up() {
      if (!this.drag) return;
      const [low, high] = [...this.drag].sort((a, b) => a - b), whole = this.range[1] - this.range[0];
      this.drag = null;
      if (high - low > whole / 50) this.zoom = [low, high];
    },
    leave() { if (!this.drag) this.cursor = null; },
    key(event) {
      const [low, high] = this.range, step = (high - low) / 50;
      const moves = {ArrowLeft: -step, ArrowRight: step};
      if (event.key in moves) this.cursor = Math.max(low, Math.min(high, (this.cursor ?? high) + moves[event.key]));
      else if (event.key === "Escape") { this.cursor = null; this.zoom = null; }
      else return;
      event.preventDefault();
    },
    draw() { this.charts.forEach((chart, number) => this.canvases[number]?.isConnected && this.paint(chart, this.canvases[number])); },
    extent(chart, low, high) {
      if (chart.percent) return [0, 1];
      const seen = chart.lines.flatMap((line) => line.y.filter((value, place) => value !== null && line.x[place] >= low && line.x[place] <= high));
      const least = Math.min(...seen), most = Math.max(...seen), pad = (most - least) * 0.06 || Math.abs(most) * 0.1 || 1;
      return seen.length ? [least - pad, most + pad] : [0, 1];
    },
    paint(chart, canvas) {
      const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, style = getComputedStyle(this.$el);
      if (!width) return;
      canvas.width = width * scale;
      canvas.height = HEIGHT * scale;
      const on = canvas.getContext("2d"), [low, high] = this.range, [least, most] = this.extent(chart, low, high);
      const px = (x) => LEFT + (x - low) / (high - low) * (width - LEFT - RIGHT);
      const py = (y) => TOP + (most - y) / (most - least) * (HEIGHT - TOP - BOTTOM);
      on.scale(scale, scale);
      on.font = "11px Roboto, system-ui, sans-serif";
      on.lineWidth = 1;
      on.strokeStyle = style.getPropertyValue("--line");
      on.fillStyle = style.getPropertyValue("--soft");
      on.textAlign = "right";
      for (const tick of ticks(least, most, 4)) {
        on.beginPath(); on.moveTo(LEFT, py(tick)); on.lineTo(width - RIGHT, py(tick)); on.stroke();
        on.fillText(short(tick, chart.percent), LEFT - 6, py(tick) + 4);
      }
      on.textAlign = "center";
      for (const tick of ticks(low, high, Math.max(2, Math.min(6, width / 90)))) on.fillText(short(tick), px(tick), HEIGHT - 6);
      on.save();
      on.beginPath(); on.rect(LEFT, TOP - 4, width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM + 8); on.clip();
      for (const line of chart.lines) this.paintLine(on, line, px, py);
      if (this.drag) {
        on.fillStyle = style.getPropertyValue("--accent"); on.globalAlpha = 0.18;
        on.fillRect(px(this.drag[0]), TOP, px(this.drag[1]) - px(this.drag[0]), HEIGHT - TOP - BOTTOM);
      } else if (this.cursor !== null) {
        on.strokeStyle = style.getPropertyValue("--soft"); on.setLineDash([]); on.lineWidth = 1;
        on.beginPath(); on.moveTo(px(this.cursor), TOP); on.lineTo(px(this.cursor), HEIGHT - BOTTOM); on.stroke();
      }
      on.restore();
      if (this.cursor !== null && !this.drag) this.paintReadings(on, chart, px, py, width, style.getPropertyValue("--panel"), style.getPropertyValue("--text"));
    },
    // Where the cursor stands, the points that are read, and their values beside it, which make room for each other.
    paintReadings(on, chart, px, py, width, ground, text) {
      const at = px(this.cursor), left = at > width - RIGHT - 60;
      on.lineJoin = "round";
      const write = (words, x, y, color) => {
        on.lineWidth = 4; on.strokeStyle = ground; on.strokeText(words, x, y);
        on.fillStyle = color; on.fillText(words, x, y);
      };
      on.setLineDash([]);
      on.textAlign = "center";
      const half = on.measureText(this.where()).width / 2 + 4, middle = Math.max(LEFT, Math.min(width - half, at));
      on.fillStyle = ground;
      on.fillRect(middle - half, HEIGHT - BOTTOM + 5, 2 * half, BOTTOM - 5); // over the numbers of the axis
      write(this.where(), middle, HEIGHT - 6, text);
      const read = chart.lines.map((line) => ({line, place: this.placed(line)})).filter(({line, place}) => place >= 0 && line.y[place] !== null && line.x[place] >= this.range[0])
        .map(({line, place}) => ({line, value: line.y[place], x: px(line.x[place]), y: py(line.y[place])})).filter(({y}) => y >= TOP - 4 && y <= HEIGHT - BOTTOM + 4)
        .sort((a, b) => a.y - b.y);
      for (const {line, x, y} of read) { on.fillStyle = this.color(line); on.beginPath(); on.arc(x, y, 3, 0, 7); on.fill(); }
      if (read.length > MAX_READINGS) return;
      on.textAlign = left ? "right" : "left";
      let above = -Infinity;
      read.forEach(({line, value, y}, number) => {
        above = Math.max(above + 13, Math.min(y + 4, HEIGHT - BOTTOM - 13 * (read.length - 1 - number)));
        write(short(value, chart.percent), at + (left ? -7 : 7), above, this.color(line));
      });
    },
    paintLine(on, line, px, py) {
      on.strokeStyle = on.fillStyle = this.color(line);
      if (line.low && !line.dots) {
        on.globalAlpha = 0.16; on.beginPath();
        line.x.forEach((x, place) => on.lineTo(px(x), py(line.low[place])));
        for (let place = line.x.length - 1; place >= 0; place -= 1) on.lineTo(px(line.x[place]), py(line.high[place]));
        on.fill(); on.globalAlpha = 1;
      }
      on.lineWidth = line.dots ? 1.2 : 1.8;
      on.setLineDash(line.dots ? [] : DASHES[line.dash % DASHES.length]);
      on.beginPath();
      line.x.forEach((x, place) => {
        if (line.dots) {
          on.moveTo(px(x), py(line.low[place])); on.lineTo(px(x), py(line.high[place]));
        } else if (line.y[place] !== null) on.lineTo(px(x), py(line.y[place]));
      });
      on.stroke();
      if (line.dots || line.x.length === 1) {
        line.x.forEach((x, place) => { on.beginPath(); on.arc(px(x), py(line.y[place]), 3.5, 0, 7); on.fill(); });
      }
    },
  },
  watch: {cursor() { this.draw(); }, zoom() { this.$nextTick(this.draw); }, drag: {deep: true, handler() { this.draw(); }}},
};
