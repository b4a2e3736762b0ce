// How good a value model is on held-out episodes, as a Vue component of NiceGUI's. Texts are never HTML.

const percent = (value) => (100 * value).toFixed(0) + "%";
const number = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));

export default {
  props: ["report", "words"],
  template: `
  <div class="hilt-stack value-model">
    <p class="hilt-soft">{{ report.path }} · {{ report.made }} · {{ report.id }}<br>{{ f("value_model.facts", facts) }}
      <b v-if="report.held.by === 'episode'">{{ w("value_model.by_episode") }}</b></p>
    <p v-for="text in report.alarms" :key="text" class="hilt-alarm">{{ text }}</p>
    <div class="hilt-columns">
      <section class="hilt-panel ranking">
        <h2>{{ w("value_model.ranking") }}</h2>
        <p class="hilt-soft">{{ w("value_model.ranking_about") }}</p>
        <div class="hilt-scroll"><table class="hilt-plain">
          <thead><tr><th scope="col"></th><th scope="col">AUC</th><th scope="col">{{ w("value_model.error") }}</th>
            <th v-if="several" scope="col">{{ w("value_model.within") }}</th><th scope="col">{{ w("value_model.interval") }}</th></tr></thead>
          <tbody><tr v-for="one in report.after" :key="one.share"><th scope="row">{{ f("value_model.after", {share: percent(one.share)}) }}</th>
            <td><b>{{ number(one.auc) }}</b></td><td>{{ number(one.calibration_error) }}</td><td v-if="several">{{ number(one.auc_within_tasks) }}</td>
            <td><span class="hilt-bar" aria-hidden="true"><i :style="{left: percent(one.interval[0]), right: percent(1 - one.interval[1])}"></i><b :style="{left: percent(one.auc)}"></b></span>
              {{ number(one.interval[0]) }} – {{ number(one.interval[1]) }}</td></tr></tbody></table></div>
      </section>
      <section class="hilt-panel reliability">
        <h2>{{ w("value_model.reliability") }}</h2>
        <p class="hilt-soft">{{ f("value_model.reliability_about", {error: number(report.error)}) }}</p>
        <svg viewBox="-15 -3 122 119" role="img" :aria-label="about">
          <g v-for="at in [0, 25, 50, 75, 100]" :key="at"><line x1="0" x2="100" :y1="at" :y2="at" class="grid"/>
            <text x="-2" :y="100 - at + 1.5" text-anchor="end">{{ at }}%</text><text :x="at" y="106" text-anchor="middle">{{ at }}%</text></g>
          <line x1="0" y1="100" x2="100" y2="0" class="perfect"/>
          <polyline :points="line" class="seen"/>
          <circle v-for="one in report.reliability" :key="one.predicted" :cx="100 * one.predicted" :cy="100 - 100 * one.observed" :r="1.2 + 5 * Math.sqrt(one.count / count)">
            <title>{{ f("value_model.group", group(one)) }}</title></circle>
          <text x="50" y="114" text-anchor="middle">{{ w("value_model.predicted") }}</text>
          <text transform="translate(-12 50) rotate(-90)" text-anchor="middle">{{ w("value_model.observed") }}</text>
        </svg>
      </section>
    </div>
    <section v-if="several" class="hilt-panel tasks">
      <h2>{{ w("value_model.tasks") }}</h2>
      <div class="hilt-scroll"><table class="hilt-plain">
        <thead><tr><th scope="col">{{ w("value_model.task") }}</th><th scope="col">{{ w("value_model.episodes") }}</th><th scope="col">{{ w("value_model.successes") }}</th>
          <th v-for="one in report.after" :key="one.share" scope="col">AUC {{ f("value_model.after", {share: percent(one.share)}) }}</th><th scope="col">{{ w("value_model.error") }}</th></tr></thead>
        <tbody><tr v-for="one in report.tasks" :key="one.task"><th scope="row">{{ one.task || w("value_model.unnamed") }}</th><td>{{ one.episodes }}</td><td>{{ one.successes }}</td>
          <td v-for="(auc, i) in one.auc" :key="i">{{ number(auc) }}</td><td>{{ number(one.calibration_error) }}</td></tr></tbody></table></div>
    </section>
    <section class="hilt-panel worst">
      <h2>{{ w("value_model.worst") }}</h2>
      <p class="hilt-soft">{{ w("value_model.worst_about") }}</p>
      <div class="episodes"><component :is="one.href ? 'a' : 'div'" v-for="one in report.worst" :key="one.log + one.number" :href="one.href || undefined" :title="one.log" class="one">
        <svg viewBox="0 0 100 40" preserveAspectRatio="none" role="img" :aria-label="outcome(one)"><line x1="0" x2="100" y1="20" y2="20" class="grid"/><line x1="50" x2="50" y1="0" y2="40" class="grid"/>
          <polyline :points="curve(one)" :class="one.succeeded ? 'success' : 'failure'"/></svg>
        <span>{{ f("value_model.episode", {number: one.number}) }}<template v-if="several"> · {{ one.task }}</template> <span class="hilt-chip">{{ outcome(one) }}</span> 
          <span v-if="one.wrong" class="hilt-chip wrong">{{ w("value_model.wrong") }}</span></span>
        <span class="hilt-soft">{{ f("value_model.at", {first: percent(one.after[0]), half: percent(one.after[1]), last: percent(one.after[2])}) }}</span>
      </component></div>
    </section>
  </div>`,
  computed: {
    several() { return this.report.tasks.length > 1; },
    count() { return this.report.reliability.reduce((sum, one) => sum + one.count, 0); },
    line() { return this.report.reliability.map((one) => `${100 * one.predicted},${100 - 100 * one.observed}`).join(" "); },
    about() { return this.report.reliability.map((one) => this.f("value_model.group", this.group(one))).join("; "); },
    facts() {
      const {trained, held} = this.report;
      return {trained: trained.episodes, successes: trained.successes, held: held.episodes, held_successes: held.successes, states: held.initial_states};
    },
  },
  methods: {
    percent, number,
    w(key) { return this.words[key] ?? key; },
    f(key, values) { return this.w(key).replace(/\{(\w+)\}/g, (_, name) => values[name]); },
    group(one) { return {predicted: percent(one.predicted), observed: percent(one.observed), count: one.count}; },
    outcome(one) { return this.w(one.succeeded ? "value_model.success" : "value_model.failure"); },
    curve(one) {
      const last = Math.max(1, one.curve.length - 1);
      return one.curve.map((value, i) => `${(100 * i) / last},${39 - 38 * value}`).join(" ");
    },
  },
};
