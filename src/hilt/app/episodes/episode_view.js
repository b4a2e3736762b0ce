// One episode, or two side by side, as a Vue component of NiceGUI's: cameras and lanes over one cursor. Texts are never HTML.

import {keepMade, made, post, undoMade} from "edits_of_tab";
import {Camera} from "episode_camera";
import {keys} from "episode_keys";
import {COLORS, timeline} from "episode_timeline";
import {versions} from "shown_values";

const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];
const LABELS = [["success", "episode.do_success", "S"], ["failure", "episode.do_failure", "F"], ["unknown", "episode.do_unknown", "U"]];
const POLL_MS = 2000; // between two looks for the edits of others
const HZ = 10; // of data that do not tell theirs

export default {
  props: ["data", "words", "readonly"],
  data: () => ({
    saved: "", elsewhere: "", asking: null, rewardValue: "", instruction: "", markName: localStorage.getItem("hilt-mark") || "grasp", tagName: "", author: localStorage.getItem("hilt-author") || "",
    episodes: [], step: 0, playing: 0, speed: 1, loop: true, into: 0, out: -1, error: "", lanesOpen: {}, where: "", dark: false,
  }),
  template: `
  <div class="hilt-stack episode">
    <p v-if="error" class="hilt-alarm" role="alert">{{ error }}</p>
    <div class="sides" :class="{two: episodes.length > 1}">
      <section v-for="(one, side) in episodes" :key="one.id" :aria-label="title(one)">
        <div class="hilt-row head">
          <a :href="back" class="hilt-tool" :title="w('episode.back')" :aria-label="w('episode.back')"><q-icon name="arrow_back"/></a>
          <h1>{{ title(one) }}</h1>
          <span class="hilt-state" :class="outcome(one)[0]">{{ outcome(one)[1] }}</span>
          <span v-for="tag in one.row.tags" :key="tag" class="hilt-chip">{{ tag }}<button v-if="editing" type="button" :aria-label="f('episode.untag', {name: tag})" @click="edit({action: 'untag', name: tag})">×</button></span>
          <span v-if="one.row.version !== null" class="hilt-chip version" :title="w('episodes.version')">{{ versions(one.row) }}</span>
          <span class="hilt-soft">{{ one.row.instruction || one.row.task }}</span>
          <span v-if="!side" class="beside">
            <a v-if="one.neighbors.previous" class="hilt-button" :href="href(one.neighbors.previous)" rel="prev">{{ w("episode.previous") }}</a>
            <span v-if="one.neighbors.position >= 0" class="hilt-soft">{{ f("episode.position", {position: one.neighbors.position + 1, matched: one.neighbors.matched.toLocaleString()}) }}</span>
            <a v-if="one.neighbors.next" class="hilt-button" :href="href(one.neighbors.next)" rel="next">{{ w("episode.next") }}</a>
          </span>
        </div>
        <p v-if="one.row.problem" class="hilt-alarm">{{ one.row.problem }}</p>
        <div class="cameras" v-if="one.lanes.cameras.length">
          <figure v-for="(camera, i) in one.lanes.cameras" :key="camera.name" :class="{large: one.large === i}">
            <canvas :ref="(element) => hold(one, i, element)" :width="camera.width" :height="camera.height" role="img"
              :aria-label="camera.name + ', ' + counted(step, one.lanes.steps)" @dblclick="one.large = one.large === i ? -1 : i"></canvas>
            <figcaption>{{ short(camera.name) }}</figcaption>
          </figure>
        </div>
        <p v-else class="hilt-soft">{{ w("episode.no_camera") }}</p>
      </section>
    </div>
    <div v-if="episodes.length" class="hilt-panel transport" role="toolbar" :aria-label="w('episode.transport')">
      <button type="button" class="hilt-tool" :title="w('episode.first')" :aria-label="w('episode.first')" @click="seek(0)"><q-icon name="skip_previous"/></button>
      <button type="button" class="hilt-tool" :title="w('episode.step_back')" :aria-label="w('episode.step_back')" @click="seek(step - 1)"><q-icon name="chevron_left"/></button>
      <button type="button" class="hilt-tool play" :title="w('episode.key_play')" :aria-label="w('episode.key_play')" :aria-pressed="!!playing" @click="toggle"><q-icon :name="playing ? 'pause' : 'play_arrow'"/></button>
      <button type="button" class="hilt-tool" :title="w('episode.step_on')" :aria-label="w('episode.step_on')" @click="seek(step + 1)"><q-icon name="chevron_right"/></button>
      <button type="button" class="hilt-tool" :title="w('episode.last')" :aria-label="w('episode.last')" @click="seek(last)"><q-icon name="skip_next"/></button>
      <span class="clock">{{ counted(step, last) }} · {{ (step / hz).toFixed(2) }} s</span>
      <label><span>{{ w("episode.speed") }}</span> <select v-model.number="speed"><option v-for="one in speeds" :key="one" :value="one">{{ one }}×</option></select></label>
      <label><input type="checkbox" v-model="loop"> {{ w("episode.loop") }}</label>
      <span class="range" role="group" :aria-label="w('episode.key_trim')">
        <button type="button" class="hilt-button" @click="from">{{ w("episode.do_from") }} <kbd>I</kbd></button>
        <button type="button" class="hilt-button" @click="upTo">{{ w("episode.do_up_to") }} <kbd>O</kbd></button>
        <button v-if="editing" type="button" class="hilt-button trim" :disabled="!ranged" :title="ranged ? f('episode.do_trim', {first: into, last: lastKept}) : w('episode.key_trim')"
          @click="trim">{{ w("episode.do_cut") }} <kbd>C</kbd></button>
        <button v-if="ranged" type="button" class="hilt-button chip" :title="w('episode.whole')" @click="whole">{{ f("episode.range", {first: into, last: lastKept}) }} ×</button></span>
      <span class="legend"><span v-for="source in acted" :key="source"><i :style="{background: color(source)}"></i>{{ w("episodes." + source) }}</span></span>
    </div>
    <div v-if="editing" class="hilt-panel labels" role="group" :aria-label="w('episode.labels')">
      <button v-for="[label, text, key] in labels" :key="label" type="button" class="hilt-button" :class="label" :aria-pressed="label === labeled" @click="edit({action: label})">
        {{ w(text) }} <kbd>{{ key }}</kbd></button>
      <button type="button" class="hilt-button" :aria-pressed="episodes[0].row.bad" @click="toggleBad">{{ w(episodes[0].row.bad ? "episode.do_good" : "episode.do_bad") }} <kbd>B</kbd></button>
      <span class="pair"><input v-model="markName" maxlength="100" :placeholder="w('episode.mark_name')" :aria-label="w('episode.mark_name')" @change="keep" @keydown.esc="leave">
        <button type="button" class="hilt-button" :disabled="!markName.trim()" @click="mark">{{ w("episode.do_mark") }} <kbd>M</kbd></button></span>
      <button type="button" class="hilt-button" :disabled="!marked" :title="marked" @click="unmark">{{ w("episode.do_unmark") }} <kbd>N</kbd></button>
      <button type="button" class="hilt-button" :disabled="!cuts" :title="w('episode.key_split')" @click="split">{{ f("episode.do_split", {name: markName.trim()}) }} <kbd>X</kbd></button>
      <form class="pair" @submit.prevent="tag"><input ref="tag" v-model="tagName" maxlength="100" :placeholder="w('episode.tag_name')" :aria-label="w('episode.tag_name')" @keydown.esc="leave">
        <button class="hilt-button" :disabled="!tagName.trim()">{{ w("episode.do_tag") }} <kbd>T</kbd></button></form>
      <form v-if="hasRewards" class="pair" @submit.prevent="reward"><input ref="reward" v-model="rewardValue" class="number" inputmode="decimal" :placeholder="w('episode.reward')" :aria-label="w('episode.reward')" @keydown.esc="leave">
        <button class="hilt-button still" :disabled="!rewardValue.trim()">{{ f("episode.do_reward", {step: at(episodes[0])}) }} <kbd>R</kbd></button></form>
      <form class="pair wide" @submit.prevent="instruct"><input ref="instruction" v-model="instruction" maxlength="1000" :placeholder="w('episode.instruction')" :aria-label="w('episode.instruction')" @keydown.esc="leave">
        <button class="hilt-button" :disabled="!instruction.trim()">{{ w("episode.do_instruction") }} <kbd>E</kbd></button></form>
      <button type="button" class="hilt-button" :disabled="!joinable" :title="w('episode.key_join')" @click="join">{{ w("episode.do_join") }} <kbd>A</kbd></button>
      <button type="button" class="hilt-button" @click="undo">{{ w("episode.do_undo") }} <kbd>Z</kbd></button>
      <button type="button" class="hilt-button delete" @click="remove">{{ w("episode.do_delete") }}</button>
      <p class="said"><span class="hilt-soft" role="status">{{ saved }}</span> <a v-if="elsewhere" :href="elsewhere">{{ w("episode.open_undone") }}</a></p>
    </div>
    <div v-if="asking" class="hilt-panel hilt-row asking" role="alertdialog" :aria-label="asking.text"><b>{{ asking.text }}</b>
      <button ref="yes" type="button" class="hilt-button" @click="answer(true)">{{ w("episode.confirm") }} <kbd>Enter</kbd></button>
      <button type="button" class="hilt-button" @click="answer(false)">{{ w("episode.cancel") }} <kbd>Esc</kbd></button></div>
    <div v-if="episodes.length" class="timelines" :class="{two: episodes.length > 1}">
      <div v-for="one in episodes" :key="one.id" class="hilt-panel timeline" role="group" :aria-label="w('episode.timeline')"
          @pointerdown="grab($event, one)" @pointermove="drag($event, one)" @pointerup="moving = null" @pointercancel="moving = null">
        <div v-for="lane in shownLanes(one)" :key="lane.name" class="lane" :class="lane.kind">
          <div class="name" :title="lane.name"><b>{{ lane.label }}</b><i v-if="lane.unit">{{ lane.unit }}</i><em>{{ reading(lane) }}</em>
            <u v-if="lane.parts.length > 1 && lane.parts.length <= 8 && lane.kind !== 'chunk'"><span v-for="(part, i) in lane.parts" :key="i" :style="{color: line(i)}">{{ part }}</span></u></div>
          <canvas :ref="(element) => (lane.canvas = element)" role="img" :aria-label="describe(one, lane)" :height="height(lane)" :style="{height: height(lane) + 'px'}"></canvas>
        </div>
        <div class="cursor" :style="{left: cursor(one)}" tabindex="0" role="slider" :aria-label="w('episode.cursor')" aria-valuemin="0" :aria-valuemax="one.lanes.steps"
          :aria-valuenow="Math.min(step, one.lanes.steps)" :aria-valuetext="counted(step, one.lanes.steps)"></div>
      </div>
    </div>
    <div v-if="episodes.length" class="below" :class="{two: episodes.length > 1}">
      <div v-for="one in episodes" :key="one.id" class="hilt-stack">
        <div class="hilt-panel numbers">
          <h2>{{ f("episode.row", {step: Math.min(step, one.lanes.steps - 1)}) }}</h2>
          <table><tbody><tr v-for="lane in one.lanes.lanes" :key="lane.name">
            <th scope="row"><label><input type="checkbox" :checked="opened(lane)" @change="open(lane)"> {{ lane.name }}</label><i v-if="lane.unit" class="hilt-soft">&nbsp;{{ lane.unit }}</i></th>
            <td><span v-for="(part, i) in lane.parts" :key="i"><i v-if="part" class="hilt-soft">{{ part }}</i> {{ exact(one, lane, i) }}</span></td></tr>
            <tr v-for="(shape, name) in one.lanes.wide" :key="name"><th scope="row">{{ name }}</th><td class="hilt-soft">{{ f("episode.wide", {shape: shape.join(" × ")}) }}</td></tr>
          </tbody></table>
        </div>
        <div v-if="one.editable" class="hilt-panel history"><h2>{{ w("episode.history") }}</h2>
          <label v-if="!readonly" class="hilt-soft">{{ w("episode.author") }} <input v-model="author" maxlength="100" @change="keep"></label>
          <ol><li v-for="edit in one.history" :key="edit.number" :class="{undone: edit.undone}">
            <b>{{ edit.text }}</b> <span class="hilt-soft">{{ edit.author }} · {{ when(edit.time) }}<template v-if="edit.undone"> · {{ w("episode.undone") }}</template></span>
            <button v-if="editing && !edit.undone && edit.undoes === null" type="button" class="hilt-button" @click="revoke(edit.number)">{{ w("episode.do_undo") }}</button></li></ol>
          <p v-if="!one.history.length" class="hilt-soft">{{ w("episode.no_history") }}</p>
          <button v-if="editing && one.history.some((edit) => edit.action.startsWith('trim') && !edit.undone)" type="button" class="hilt-button" @click="edit({action: 'show_all'})">{{ w("episode.do_show_all") }}</button>
        </div>
        <div class="hilt-panel facts"><h2>{{ w("episode.facts") }}</h2>
          <dl><template v-for="(value, name) in one.lanes.facts" :key="name"><dt>{{ name }}</dt><dd>{{ typeof value === "string" ? value : JSON.stringify(value) }}</dd></template></dl>
          <p v-if="!Object.keys(one.lanes.facts).length" class="hilt-soft">{{ w("episode.no_facts") }}</p>
          <p v-if="!one.editable" class="hilt-soft">{{ w("episode.read_only") }}</p>
        </div>
      </div>
    </div>
  </div>`,
  computed: {
    speeds: () => SPEEDS,
    labels: () => LABELS,
    last() { return Math.max(0, ...this.episodes.map((one) => one.lanes.steps)); },
    end() { return this.out >= 0 ? Math.min(this.out, this.last) : this.last; },
    hz() { return this.episodes[0]?.lanes.hz || HZ; },
    editing() { return !this.readonly && this.episodes.length === 1 && this.episodes[0].editable; },
    labeled() { return {true: "success", false: "failure", null: "unknown"}[this.episodes[0].row.success]; },
    marks() { return this.episodes[0]?.lanes.marks || []; },
    // The mark at the cursor: the one of the name in the field, else another one.
    marked() { return this.markOf(this.at(this.episodes[0])); },
    cuts() { return this.marks.some(([step, name]) => step > 0 && name === this.markName.trim()); },
    hasRewards() { return this.episodes[0].lanes.lanes.some((lane) => lane.name === "rewards"); },
    joinable() { return this.episodes[0]?.following || null; },
    // Steps count from 0, and a range has its last step; behind the last step of all stands what was seen at the end.
    lastKept() { return Math.min(this.end, this.last - 1); },
    ranged() { return this.into > 0 || this.lastKept < this.last - 1; },
    back() {
      const query = new URLSearchParams(location.search);
      ["source", "number", "lane", "beside"].forEach((name) => query.delete(name));
      return "/episodes?" + query;
    },
    acted() {
      const found = new Set(this.episodes.flatMap((one) => one.lanes.source.map((value) => one.lanes.sources[value])));
      return Object.keys(COLORS).filter((source) => found.has(source));
    },
  },
  watch: {
    step() { this.shown(); },
  },
  methods: {
    ...timeline,
    ...keys,
    w(key) { return this.words[key] ?? key; },
    f(key, values) { return this.w(key).replace(/\{(\w+)\}/g, (_, name) => values[name]); },
    counted(step, steps) {
      return step < steps ? this.f("episode.step", {step, last: steps - 1}) : this.f("episode.at_end", {last: steps - 1});
    },
    versions(row) { return versions(row, (start) => this.f("episodes.started", {start})); },
    color: (source) => COLORS[source],
    title(one) { return `${one.row.group || one.name} · ${this.f("episode.title", {number: one.row.number})}${one.row.lane ? "·" + one.row.lane : ""}`; },
    outcome(one) {
      if (one.row.problem) return ["died", this.w("episodes.damaged")];
      if (one.row.success === null) return ["unknown", this.w("episodes.unknown")];
      return one.row.success ? ["learning", this.w("episodes.yes")] : ["died", this.w("episodes.no")];
    },
    href(row) {
      const query = new URLSearchParams(location.search);
      for (const name of ["source", "number", "lane"]) query.set(name, row[name]);
      query.delete("beside");
      return "/episode?" + query;
    },
    // Looks for the edits that others have made: in this app, by a command, or in another one.
    async look() {
      const one = this.episodes[0], newest = (answer) => answer.history?.[0]?.number ?? 0;
      if (one?.editable && !document.hidden) {
        const {source, number, lane} = one.row;
        const asked = new URLSearchParams({data: this.data, source, number, lane, light: 1});
        const answer = await (await fetch("/episodes/one?" + asked)).json();
        // in its turn, behind the edits of this page: these are not loaded a second time
        const load = () => (this.episodes[0] === one && newest(answer) > newest(one) ? this.load(true) : null);
        await (this.queue = (this.queue ?? Promise.resolve()).then(load).catch(() => {}));
      }
    },
    watchOthers() {
      this.timer = setTimeout(() => this.look().catch(() => {}).finally(() => this.listener && this.watchOthers()), POLL_MS);
    },
    async load(again) {
      const query = new URLSearchParams(location.search), wanted = [[query.get("source"), query.get("number") || 0, query.get("lane") || 0]];
      if (query.get("beside")) wanted.push(query.get("beside").split(":"));
      const loaded = [];
      for (const [source, number, lane] of wanted) {
        const asked = new URLSearchParams(query);
        for (const [name, value] of [["source", source], ["number", number], ["lane", lane]]) asked.set(name, value);
        const answer = await (await fetch("/episodes/one?" + asked)).json();
        if (answer.error) { this.error = answer.error; continue; }
        // The browser keeps frames; an edit may give their steps other numbers.
        const name = new URLSearchParams({data: this.data, source, number, lane, edits: answer.history[0]?.number ?? 0});
        const cameras = answer.lanes.cameras.map((camera) =>
          new Camera(`/episodes/frame?${name}&camera=${encodeURIComponent(camera.name)}&step=`, answer.lanes.steps));
        answer.lanes.lanes.forEach((lane) => Object.assign(lane, this.scale(lane), {label: this.short(lane.name)}));
        answer.lanes.__v_skip = true; // many numbers that never change: Vue need not watch them
        const who = {name: "who", kind: "who", label: this.w("episodes.who"), unit: "", parts: [""], values: [answer.lanes.source]};
        loaded.push({...answer, id: asked.toString(), cameras, large: -1, who, lanes: answer.lanes});
      }
      this.episodes = loaded;
      if (document.activeElement !== this.$refs.instruction) this.instruction = loaded[0]?.row.instruction || "";
      this.step = Math.min(this.last, Math.max(0, (again ? this.step : +query.get("step")) || 0));
      await this.$nextTick();
      this.shown();
      this.draw();
    },
    when(time) { return Date.parse(new Date(time)) ? `${new Date(time).toISOString().slice(0, 16).replace("T", " ")} UTC` : `${time}`; },
    keep() { localStorage.setItem("hilt-author", this.author); localStorage.setItem("hilt-mark", this.markName); },
    // One edit. The tick appears when the server has it on disk; what it changes in the steps is loaded anew.
    edit(given) { return (this.queue = (this.queue ?? Promise.resolve()).then(() => this.send(given)).catch(() => ([this.saved, this.error] = ["", this.w("episodes.offline")]))); },
    async send(asked) {
      const given = typeof asked === "function" ? asked() : asked; // what depends on the edits before it is asked for in its turn
      if (!given || !this.editing) return;
      const one = this.episodes[0], {source, number, lane} = one.row;
      [this.saved, this.elsewhere] = ["…", ""];
      const answer = await post("/episodes/edit", {data: this.data, source, number, lane, author: this.author, ...given});
      if (answer.error) { [this.saved, this.error] = ["", answer.error]; return; }
      const lost = answer.lost.map((what) => " · " + this.w({reward: "episode.cut_reward", end: "episode.cut_end"}[what])).join("");
      [this.error, this.saved] = ["", "✓ " + this.f("episode.saved", {action: answer.edit.text}) + lost];
      keepMade([...made(), {data: this.data, source, number, lane, edit: answer.edit.number, action: answer.edit.text}]);
      one.history = answer.history;
      if ((!answer.row || answer.row.deleted) && answer.shown.length) { // other episodes took its place
        sessionStorage.setItem("hilt-saved", this.saved);
        location.href = this.href({source, number: answer.shown[0], lane: 0});
        return;
      }
      if (!answer.row) { this.error = this.w("episode.gone"); return; }
      one.row = answer.row;
      if (answer.row.deleted) { this.error = this.w("episode.gone"); return; }
      if (!["success", "failure", "unknown", "bad", "good", "tag", "untag"].includes(given.action)) { [this.into, this.out] = [0, -1]; await this.load(true); }
    },
    toggleBad() { return this.edit(() => ({action: this.episodes[0].row.bad ? "good" : "bad"})); },
    mark() { return this.edit({action: "mark", name: this.markName.trim(), step: this.at(this.episodes[0])}); },
    // The mark of a step that is removed first: the one with the name in the field.
    markOf(step) {
      const here = this.marks.filter(([at]) => at === step).map(([, name]) => name);
      return here.includes(this.markName.trim()) ? this.markName.trim() : here[0];
    },
    unmark() {
      const step = this.at(this.episodes[0]);
      return this.edit(() => this.markOf(step) && {action: "unmark", name: this.markOf(step), step});
    },
    leave(event) { event.target.blur(); },
    tag() { const name = this.tagName.trim(); this.tagName = ""; document.activeElement?.blur(); return this.edit({action: "tag", name}); },
    reward() {
      const value = this.rewardValue.trim();
      this.rewardValue = "";
      document.activeElement?.blur();
      return this.edit({action: "reward", value, step: this.at(this.episodes[0])});
    },
    instruct() { const text = this.instruction.trim(); document.activeElement?.blur(); return this.edit({action: "instruction", text}); },
    split() { return this.edit(() => this.cuts && {action: "split", name: this.markName.trim()}); },
    join() {
      const next = this.joinable, date = next?.date ? ` (${this.when(next.date * 1000)})` : "";
      if (next) this.ask(this.f("episode.ask_join", {number: next.number, steps: next.length}) + date, () => this.edit({action: "join", other: next.number}));
    },
    remove() { this.ask(this.w("episode.ask_delete"), () => this.edit({action: "delete"})); },
    // Asks once; Enter does it, Esc does not.
    ask(text, go) { this.asking = {text, go}; this.$nextTick(() => this.$refs.yes?.focus()); },
    answer(yes) { const {go} = this.asking; this.asking = null; if (yes) go(); },
    from() { this.into = Math.max(0, Math.min(this.step, this.last - 1)); if (this.out >= 0 && this.out < this.into) this.out = -1; this.draw(); },
    upTo() { this.out = Math.max(0, Math.min(this.step, this.last - 1)); if (this.out < this.into) this.into = 0; this.draw(); },
    whole() { [this.into, this.out] = [0, -1]; this.draw(); },
    trim() { return this.edit({action: "trim", first: this.into, last: this.lastKept}); },
    revoke(number) { return this.edit({action: "undo", edit: number}); },
    undo() { return (this.queue = (this.queue ?? Promise.resolve()).then(() => this.undoLast()).catch(() => ([this.saved, this.error] = ["", this.w("episodes.offline")]))); },
    // Undoes the last edit of this tab, of whichever episode.
    async undoLast() {
      const edits = made(), last = edits.pop(), here = this.episodes[0]?.row;
      [this.saved, this.elsewhere] = [this.w("episode.nothing_to_undo"), ""];
      if (!last || !here) return;
      const answer = await undoMade(last, this.author);
      keepMade(edits);
      if (last.several) { // of many episodes: this one may be among them
        this.saved = answer.count ? "✓ " + this.f("episodes.undid_many", {action: last.action, count: answer.count}) : "";
        await this.load(true);
        this.error = answer.error || "";
        return;
      }
      if (answer.error) { [this.saved, this.error] = ["", answer.error]; return; }
      this.saved = "✓ " + this.f("episode.undid", {action: last.action, number: last.number});
      if (last.source !== here.source || !answer.edit.episodes.includes(here.number)) {
        const {data, source, number, lane} = last;
        this.elsewhere = "/episode?" + new URLSearchParams({data, source, number, lane});
        return;
      }
      this.error = "";
      if (!answer.shown.includes(here.number) && answer.shown.length) { // others stand in its place again
        sessionStorage.setItem("hilt-saved", this.saved);
        location.href = this.href({source: here.source, number: answer.shown[0], lane: 0});
        return;
      }
      [this.into, this.out] = [0, -1];
      await this.load(true);
    },
    short(name) { return name.replace(/^observations\//, "").replace(/^record\//, ""); },
    hold(one, i, element) {
      if (element && one.cameras[i].canvas !== element) one.cameras[i].canvas = element;
    },
    at(one) { return Math.min(this.step, one.lanes.steps - 1); },
    exact(one, lane, i) { return String(lane.values[i][this.at(one)] ?? "–"); },
    shown() {
      if (this.step !== this.before) this.direction = this.step < this.before ? -1 : 1; // the way that the cursor goes
      this.before = this.step;
      const direction = this.playing ? Math.sign(this.playing) : this.direction ?? 1;
      for (const one of this.episodes) for (const camera of one.cameras) camera.show(this.step, direction);
      for (const one of this.episodes) for (const lane of this.shownLanes(one)) if (lane.kind === "chunk") this.paint(one, lane);
      clearTimeout(this.noting);
      this.noting = setTimeout(() => {
        const query = new URLSearchParams(location.search);
        query.set("step", this.step);
        history.replaceState(null, "", "/episode?" + query);
      }, 400);
    },
    seek(step) {
      this.step = Math.min(this.last, Math.max(0, Math.round(step)));
    },
    toggle() { this.play(this.playing ? 0 : 1); },
    play(direction) {
      this.playing = direction;
      if (!direction) return;
      if (direction > 0 && this.step >= this.end) this.step = this.into;
      let [before, rest] = [performance.now(), 0];
      const tick = (now) => {
        if (this.playing !== direction) return;
        // A frame waits until its pictures are there: what is played is what is seen.
        const ready = this.episodes.every((one) => one.cameras.every((camera) => camera.shown === camera.wanted || camera.error));
        rest = ready ? rest + ((now - before) / 1000) * this.hz * this.speed * Math.abs(direction) : Math.min(rest, 1);
        before = now;
        if (ready && rest >= 1) {
          let next = this.step + Math.sign(direction) * Math.floor(rest);
          rest -= Math.floor(rest);
          if (next > this.end || next < this.into) {
            if (!this.loop) { this.playing = 0; next = direction > 0 ? this.end : this.into; }
            else next = direction > 0 ? this.into : this.end;
          }
          this.step = next;
        }
        requestAnimationFrame(tick);
      };
      requestAnimationFrame(tick);
    },
  },
  mounted() {
    this.$el.component = this;
    document.addEventListener("keydown", (this.listener = (event) => this.key(event)));
    window.addEventListener("resize", (this.resized = () => this.draw()));
    this.load().catch((error) => (this.error = String(error)));
    this.watchOthers();
    this.saved = sessionStorage.getItem("hilt-saved") || ""; // of the edit that led here
    sessionStorage.removeItem("hilt-saved");
  },
  unmounted() {
    clearTimeout(this.timer);
    document.removeEventListener("keydown", this.listener);
    window.removeEventListener("resize", this.resized);
    this.listener = null;
    this.playing = 0;
  },
};
