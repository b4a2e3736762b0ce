// Frames to label and a classifier's mistakes, as a Vue component of NiceGUI's. Texts are never HTML.

const POLL_MS = 500;
const AHEAD = 4; // pictures that are fetched before they are shown
const LABELS = [["success", "S"], ["failure", "F"], ["unknown", "U"]];
const HEIGHT = 360;
const percent = (value) => (value === null ? null : (100 * value).toFixed(1) + "%");

export default {
  props: ["data", "several", "readonly", "words"],
  data: () => ({
    state: null, frames: [], cameras: {}, labeled: {success: 0, failure: 0, unknown: 0}, at: 0, made: [], saved: "", error: "", busy: false,
    scoreError: "", settings: "", author: localStorage.getItem("hilt-author") || "", report: null, threshold: 0.5, use: null, asking: false,
    usedAt: "", chosen: "", training: false, scoring: false,
  }),
  template: `
  <div class="hilt-stack classifier">
    <div class="hilt-row">
      <h1>{{ state ? f("classifier.title", {name: state.name}) : "" }}</h1>
      <a v-if="several" href="/classifier">{{ w("classifier.other") }}</a>
      <a class="hilt-button" :href="'/episodes?data=' + data">{{ w("classifier.episodes") }}</a>
      <label class="which"><span class="hilt-soft">{{ w("classifier.which") }}</span>
        <select v-model="chosen" @change="choose" :disabled="!state?.classifiers.length">
          <option v-if="!state?.classifiers.length" value="">{{ w("classifier.none") }}</option>
          <option v-for="one in state?.classifiers" :key="one.key" :value="one.key" :title="one.path">{{ one.name }}</option>
        </select></label>
    </div>
    <p v-if="error" class="hilt-alarm" role="alert">{{ error }}</p>
    <p v-for="(text, path) in state?.problems" :key="path" class="hilt-alarm">{{ text }}</p>
    <p v-if="state && !state.images" class="hilt-empty">{{ w("classifier.no_images") }}</p>
    <section v-if="state?.images" class="hilt-panel label" :aria-label="w('classifier.label')">
      <h2>{{ w("classifier.label") }}</h2>
      <p class="hilt-soft">{{ w(state.chosen ? "classifier.uncertain" : "classifier.spread") }}</p>
      <template v-if="readonly">
        <p>{{ w("classifier.score_command") }}</p>
        <div class="hilt-command score"><code>{{ state.score.command }}</code><button type="button" class="hilt-tool" :aria-label="w('classifier.copy')" @click="copy"><q-icon name="content_copy"/></button></div>
      </template>
      <template v-else>
        <p v-if="scoring" class="hilt-soft" role="status">{{ w("classifier.scoring") }} {{ state.score.lines.at(-1) }}</p>
        <p v-if="scoreError" class="hilt-alarm">{{ w("classifier.score_failed") }} {{ scoreError }}</p>
        <div v-if="frame" class="frame" :class="frame.done">
          <div class="pictures"><img v-for="camera in cameras[frame.source]" :key="camera + at" :src="picture(frame, camera)"
            :alt="f('classifier.frame', {number: frame.number, step: frame.step}) + ', ' + camera"></div>
          <div class="hilt-row">
            <strong>{{ w("classifier.question") }}</strong>
            <a :href="href(frame)">{{ f("classifier.frame", {number: frame.number, step: frame.step}) }}</a>
            <span v-if="frame.probability !== null" class="hilt-chip p">{{ f("classifier.probability", {value: frame.probability.toFixed(3)}) }}</span>
            <span v-if="frame.label !== null" class="hilt-chip">{{ f("classifier.recorded", {label: w(frame.label ? "classifier.success" : "classifier.failure")}) }}</span>
            <span v-if="frame.done" class="hilt-chip done">{{ w("classifier." + frame.done) }}</span>
          </div>
          <div class="hilt-row keys" role="group" :aria-label="w('classifier.label')">
            <button v-for="[label, key] in labels" :key="label" type="button" class="hilt-button" :class="label" :disabled="busy" @click="give(label)">{{ w("classifier." + label) }} <kbd>{{ key }}</kbd></button>
            <button type="button" class="hilt-button" :disabled="busy || !made.length" @click="undo">{{ w("classifier.undo") }} <kbd>Z</kbd></button>
            <label class="hilt-soft">{{ w("classifier.author") }} <input v-model="author" maxlength="100" @change="keep"></label>
          </div>
        </div>
        <p v-else-if="state.score.code === 0 && !scoring" class="hilt-soft">{{ w("classifier.done") }}</p>
        <p class="hilt-soft counts" role="status" aria-live="polite">{{ saved }}</p>
        <p class="hilt-soft">{{ f("classifier.labeled", labeled) }}<template v-if="frames.length"> · {{ f("classifier.left", {left, count: frames.length}) }}</template></p>
        <div v-if="frames.length" class="strip" aria-hidden="true"><img v-for="(one, i) in near" :key="one.source + one.number + '.' + one.step" :src="picture(one, cameras[one.source][0], 64)"
          :class="[one.done, {at: one === frame}]" @click="at = frames.indexOf(one)" alt=""></div>
        <details v-if="frame"><summary>{{ w("classifier.label_command") }}</summary>
          <div class="hilt-command"><code>hilt data label {{ frame.log }} {{ frame.number }} --frame success --step {{ frame.step }}</code><button type="button" class="hilt-tool" :aria-label="w('classifier.copy')" @click="copy"><q-icon name="content_copy"/></button></div>
        </details>
      </template>
    </section>
    <section v-if="state?.images" class="hilt-panel train" :aria-label="w('classifier.train')">
      <h2>{{ w("classifier.train") }}</h2>
      <p class="hilt-soft">{{ w("classifier.train_about") }}</p>
      <div class="hilt-row" v-if="!readonly">
        <input v-model="settings" class="settings" :placeholder="w('classifier.settings')" :aria-label="w('classifier.settings')" @change="look" spellcheck="false">
        <button v-if="!training" type="button" class="hilt-button primary start" :disabled="busy" @click="train">{{ w("classifier.train_start") }}</button>
        <button v-else type="button" class="hilt-button stop" @click="post('stop')">{{ w("classifier.train_stop") }}</button>
      </div>
      <p v-if="state.train.problem" class="hilt-alarm">{{ state.train.problem }}</p>
      <div v-else class="hilt-command"><code>{{ state.train.running ? state.train.text : state.train.command }}</code><button type="button" class="hilt-tool" :aria-label="w('classifier.copy')" @click="copy"><q-icon name="content_copy"/></button></div>
      <div v-if="training" class="hilt-row"><progress :max="state.train.progress[1] || undefined" :value="state.train.progress.length ? state.train.progress[0] : undefined" :aria-label="w('classifier.train')"></progress>
        <span class="hilt-soft">{{ state.train.progress.length ? f("classifier.progress", {done: state.train.progress[0], total: state.train.progress[1]}) : w("classifier.working") }}</span></div>
      <p v-else-if="state.train.code !== null" role="status" :class="state.train.code ? 'hilt-alarm' : 'hilt-soft'">{{ state.train.code ? f("classifier.train_failed", {code: state.train.code}) : w("classifier.trained") }}</p>
      <pre v-if="state.train.lines.length" class="hilt-output">{{ state.train.lines.join("\\n") }}</pre>
    </section>
    <section v-if="state?.images" class="hilt-panel held" :aria-label="w('classifier.held_out')">
      <h2>{{ w("classifier.held_out") }}</h2>
      <template v-if="!state.chosen">
        <p>{{ w("classifier.no_classifier") }}</p>
        <div class="hilt-command"><code>{{ state.train.command }}</code><button type="button" class="hilt-tool" :aria-label="w('classifier.copy')" @click="copy"><q-icon name="content_copy"/></button></div>
      </template>
      <template v-else-if="report">
        <p class="hilt-soft">{{ report.name }} · {{ report.made }} · {{ f("classifier.facts", {frames: report.frames, episodes: report.episodes, accuracy: percent(report.accuracy), majority: percent(report.majority)}) }}
          <b v-if="report.by === 'episode'">{{ w("classifier.by_episode") }}</b></p>
        <p v-if="!point" class="hilt-alarm">{{ w("classifier.older") }}</p>
        <div v-else class="figures">
          <div class="choice">
            <label class="slider"><span>{{ w("classifier.threshold") }} <b>{{ point.threshold }}</b> <i class="hilt-soft">{{ f("classifier.own", {value: report.threshold}) }}</i></span>
              <input ref="slider" type="range" min="0.01" max="0.99" step="0.01" v-model.number="threshold" @change="askUse" :aria-valuetext="about"></label>
            <svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" :aria-label="about">
              <line v-for="y in [25, 50, 75]" :key="y" x1="0" x2="100" :y1="y" :y2="y" class="grid"/>
              <polyline v-for="line in lines('precision')" :key="line" :points="line" class="precision"/>
              <polyline v-for="line in lines('recall')" :key="line" :points="line" class="recall"/>
              <line :x1="100 * point.threshold" :x2="100 * point.threshold" y1="0" y2="100" class="cursor"/>
            </svg>
            <div class="hilt-row legend"><span class="precision">{{ w("classifier.precision") }} <b>{{ percent(point.precision) ?? w("classifier.undefined") }}</b></span>
              <span class="recall">{{ w("classifier.recall") }} <b>{{ percent(point.recall) ?? w("classifier.undefined") }}</b></span></div>
          </div>
          <table class="confusion"><caption>{{ w("classifier.confusion") }}</caption>
            <thead><tr><td></td><th scope="col">{{ w("classifier.called_success") }}</th><th scope="col">{{ w("classifier.called_failure") }}</th></tr></thead>
            <tbody><tr><th scope="row">{{ w("classifier.is_success") }}</th><td class="right">{{ point.hits }}</td><td class="wrong">{{ point.missed }}</td></tr>
              <tr><th scope="row">{{ w("classifier.is_failure") }}</th><td class="wrong">{{ point.false_successes }}</td><td class="right">{{ point.rejected }}</td></tr></tbody></table>
        </div>
        <template v-if="point"><div v-for="kind in ['false_successes', 'missed']" :key="kind" class="worst" :class="kind">
          <h3>{{ w("classifier." + kind) }}</h3>
          <p v-if="!mistakes(kind).length" class="hilt-soft">{{ w("classifier.no_mistakes") }}</p>
          <div class="pictures"><component :is="one.href ? 'a' : 'span'" v-for="one in mistakes(kind)" :key="one.where + one.step" :href="one.href || undefined">
            <img v-if="one.picture" :src="one.picture" loading="lazy" :alt="one.where">
            <span><b>{{ one.probability.toFixed(2) }}</b> {{ one.href ? f("classifier.frame", {number: one.trajectory, step: one.step}) : one.where + ", " + one.step }}</span></component></div>
        </div></template>
      </template>
    </section>
    <section v-if="use && report" class="hilt-panel use" :aria-label="w('classifier.use')">
      <h2>{{ w("classifier.use") }}</h2>
      <p>{{ w(use.why) }}</p>
      <div class="hilt-command"><code>{{ use.command }}</code><button type="button" class="hilt-tool" :aria-label="w('classifier.copy')" @click="copy"><q-icon name="content_copy"/></button></div>
      <div class="hilt-row" v-if="use.resumes && !readonly">
        <button type="button" class="hilt-button start" @click="start">{{ w(asking ? "classifier.sure" : "classifier.use_start") }}</button></div>
      <a v-if="usedAt" :href="usedAt">{{ w("classifier.use_started") }}</a>
    </section>
  </div>`,
  computed: {
    labels: () => LABELS,
    frame() { return this.frames[this.at]; },
    left() { return this.frames.filter((one) => !one.done).length; },
    near() { const first = Math.max(0, this.at - 2); return this.frames.slice(first, first + 12); },
    point() {
      const points = this.report?.curve ?? [];
      return points.reduce((best, one) => (!best || Math.abs(one.threshold - this.threshold) < Math.abs(best.threshold - this.threshold) ? one : best), null);
    },
    about() {
      const text = (value) => percent(value) ?? this.w("classifier.undefined");
      return this.point ? this.f("classifier.curve", {threshold: this.point.threshold, precision: text(this.point.precision), recall: text(this.point.recall)}) : "";
    },
  },
  watch: {
    at() { this.ahead(); },
  },
  methods: {
    percent,
    w(key) { return this.words[key] ?? key; },
    f(key, values) { return this.w(key).replace(/\{(\w+)\}/g, (_, name) => values[name]); },
    copy(event) { window.hiltCopy(event.currentTarget); },
    keep() { localStorage.setItem("hilt-author", this.author); },
    place(one) { return {data: this.data, source: one.source, number: one.number, step: one.shown}; },
    href(one) { return "/episode?" + new URLSearchParams(this.place(one)); },
    picture(one, camera, height = HEIGHT) { return "/episodes/frame?" + new URLSearchParams({...this.place(one), camera, height}); },
    ahead() {
      for (const one of this.frames.slice(this.at + 1, this.at + 1 + AHEAD)) for (const camera of this.cameras[one.source]) new Image().src = this.picture(one, camera);
    },
    // The pieces of a line over the threshold: precision is undefined where no frame is called a success.
    lines(name) {
      const pieces = [[]];
      for (const one of this.report.curve) one[name] === null ? pieces.push([]) : pieces.at(-1).push(`${100 * one.threshold},${100 - 100 * one[name]}`);
      return pieces.filter((piece) => piece.length).map((piece) => piece.join(" "));
    },
    mistakes(kind) {
      const wrong = (one) => (one.probability >= this.point.threshold) !== one.success;
      return this.report.worst.filter((one) => one.success === (kind === "missed") && wrong(one));
    },
    async get(name, more = {}) {
      const answer = await (await fetch(`/classifier/${name}?` + new URLSearchParams({data: this.data, classifier: this.chosen, ...more}))).json();
      if (answer.error) throw new Error(answer.error);
      return answer;
    },
    async post(name, more = {}, path = "/classifier/") {
      const body = JSON.stringify({data: this.data, classifier: this.chosen, ...more});
      const answer = await (await fetch(path + name, {method: "POST", body})).json();
      if (answer.error) throw new Error(answer.error);
      return answer;
    },
    async tried(work) {
      try { this.error = ""; await work(); } catch (error) { this.error = error.message; }
    },
    // An answer that comes after that to a later question is left out.
    async refresh() {
      const turn = (this.asked = (this.asked ?? 0) + 1), state = await this.get("state", {settings: this.settings});
      if (turn > (this.answered ?? 0)) [this.answered, this.state] = [turn, state];
    },
    // How far the work is; follows it while something runs.
    async look() {
      clearTimeout(this.timer);
      await this.tried(async () => {
        await this.refresh();
        if (this.training && !this.state.train.running) await this.ended();
        else if (this.scoring && !this.state.score.running) await this.scored();
        [this.training, this.scoring] = [this.state.train.running, this.state.score.running];
        if (!this.chosen) this.chosen = this.state.chosen;
      });
      if (!this.gone && (this.training || this.scoring || this.error)) this.timer = setTimeout(() => this.look(), POLL_MS * (this.error ? 6 : 1));
    },
    // A training has ended: the newest classifier judges from now on.
    async ended() {
      if (this.state.train.code !== 0) return;
      this.chosen = "";
      await this.refresh();
      this.chosen = this.state.chosen;
      await this.judge();
      await this.score();
    },
    async scored() {
      this.scoreError = this.state.score.code ? this.state.score.lines.at(-1) || String(this.state.score.code) : "";
      if (this.scoreError) return;
      const found = await this.get("queue");
      [this.frames, this.cameras, this.labeled, this.at, this.made] = [found.frames.map((one) => ({...one, done: ""})), found.cameras, found.labeled, 0, []];
      this.ahead();
    },
    async judge() {
      [this.report, this.use, this.usedAt, this.asking] = [null, null, "", false];
      if (!this.chosen) return;
      this.report = await this.get("report");
      this.threshold = this.report.threshold;
      await this.askUse();
    },
    async askUse() { this.asking = false; if (this.point || this.report) this.use = await this.get("use", {threshold: this.point?.threshold ?? this.threshold}); },
    async score() {
      if (this.readonly || !this.state.images) return;
      await this.post("score");
      await this.refresh();
      this.scoring = true;
    },
    choose() { this.tried(async () => { await this.judge(); await this.score(); await this.look(); }); },
    train() { this.tried(async () => { await this.post("train", {settings: this.settings}); this.training = true; await this.look(); }); },
    async start() {
      if (!this.asking) { this.asking = true; return; }
      await this.tried(async () => { this.usedAt = (await this.post("start_use", {threshold: this.point?.threshold ?? this.threshold})).run; });
      this.asking = false;
    },
    async give(label) {
      const frame = this.frame;
      if (this.busy || !frame) return;
      this.busy = true;
      await this.tried(async () => {
        const given = {action: "frame", label, recorded: frame.step, source: frame.source, number: frame.number, lane: 0, author: this.author};
        const {edit} = await this.post("edit", given, "/episodes/");
        this.made.push({edit: edit.number, at: this.frames.indexOf(frame), label, before: frame.done});
        if (frame.done) this.labeled[frame.done]--;
        this.labeled[label]++;
        [frame.done, this.saved] = [label, "✓ " + this.f("classifier.saved", {action: edit.text})];
        const next = this.frames.findIndex((one, i) => i > this.at && !one.done);
        this.at = next >= 0 ? next : Math.max(0, this.frames.findIndex((one) => !one.done) >= 0 ? this.frames.findIndex((one) => !one.done) : this.frames.length);
      });
      this.busy = false;
      this.tried(async () => { await this.refresh(); });
    },
    async undo() {
      const last = this.made.at(-1);
      if (this.busy || !last) return;
      this.busy = true;
      await this.tried(async () => {
        const frame = this.frames[last.at];
        const {edit} = await this.post("edit", {action: "undo", edit: last.edit, source: frame.source, number: frame.number, lane: 0, author: this.author}, "/episodes/");
        this.made.pop();
        this.labeled[last.label]--;
        if (last.before) this.labeled[last.before]++;
        [frame.done, this.at, this.saved] = [last.before, last.at, "✓ " + this.f("classifier.saved", {action: edit.text})];
      });
      this.busy = false;
    },
    key(event) {
      const slides = event.target.closest("input[type=range]");
      if ((event.target.closest("input, select, textarea, dialog[open]") && !slides) || event.ctrlKey || event.metaKey || event.altKey) return;
      const key = event.key.length === 1 ? event.key.toLowerCase() : event.key, label = LABELS.find(([, one]) => one.toLowerCase() === key);
      if (key === "t" && this.$refs.slider) { this.$refs.slider.focus(); this.$refs.slider.scrollIntoView({block: "center"}); }
      else if (this.readonly || slides && key.startsWith("Arrow")) return;
      else if (label && this.frame) this.give(label[0]);
      else if (key === "z") this.undo();
      else if (key === "ArrowRight") this.at = Math.min(this.frames.length - 1, this.at + 1);
      else if (key === "ArrowLeft") this.at = Math.max(0, this.at - 1);
      else if (key === "Enter" && this.frame && !event.target.closest("a, button, summary")) location.href = this.href(this.frame);
      else return;
      event.preventDefault();
    },
  },
  async mounted() {
    this.$el.component = this;
    document.addEventListener("keydown", (this.listener = (event) => this.key(event)));
    await this.tried(async () => {
      await this.refresh();
      [this.chosen, this.training] = [this.state.chosen, this.state.train.running];
      await this.judge();
      await this.score();
    });
    await this.look();
  },
  unmounted() {
    this.gone = true;
    clearTimeout(this.timer);
    document.removeEventListener("keydown", this.listener);
  },
};
