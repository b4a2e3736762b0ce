// The list of episodes, as a Vue component of NiceGUI's. Rows come from the server page by page; texts are never HTML.

import {keepMade, made, post, undoMade} from "edits_of_tab";
import {versions, whole} from "shown_values";

const FIRST_ROWS = 18; // fill a screen: they are drawn first, and the rows below them a moment later
const COLUMNS = [
  ["frames", ""], ["number", "number"], ["task", "task"], ["length", "length"], ["return", "return"], ["success", "success"],
  ["who", "human"], ["version", "version"], ["date", "date"], ["tags", "tags"],
];
const RIGHT = ["number", "length", "return", "version"];
const SOURCES = ["policy", "human", "demo", "random"];
// What can be done with all that are selected: the action, its text, its key.
const BULK = [
  ["success", "episode.do_success", "S"], ["failure", "episode.do_failure", "F"], ["unknown", "episode.do_unknown", "U"],
  ["bad", "episode.do_bad", "B"], ["good", "episode.do_good", ""],
];
// The conditions of a filter: words, with what stands in quotes kept together.
const conditions = (text) => text.match(/(?:[^\s"']+|"[^"]*"|'[^']*')+/g) || [];
const quoted = (value) => (/[\s"'\\]/.test(value) ? "'" + value.replaceAll("'", "'\"'\"'") + "'" : value);

export default {
  props: ["data", "several", "readonly", "words", "count"],
  data: () => ({
    filter: "", typed: "", sort: "number", descending: false, first: 0, page: null, error: "", chosen: new Set(), at: -1, saving: "",
    drawn: 0, done: "", exporting: false, to: "lerobot", commands: [], runnable: [], started: null, where: [], commandError: "", slow: false,
    all: null, tagName: "", asking: "", bulkShown: false, bulkCommands: [], bulkError: "", // of what is selected; `all`: the filter that shows just these
  }),
  template: `
  <div class="hilt-stack episodes" :aria-busy="slow">
    <div class="hilt-row top">
      <h1>{{ page ? page.name || w("episodes.together") : w("episodes.title") }}</h1>
      <span v-if="page" class="hilt-chip">{{ page.format }}</span>
      <a v-if="several" href="/episodes">{{ w("episodes.other") }}</a>
      <a v-if="page && page.name && page.format === 'log'" class="hilt-button" :href="'/classifier?data=' + data">{{ w("episodes.classifier") }}</a>
      <span class="hilt-soft" role="status">{{ status }}</span>
      <span class="hilt-soft" role="status">{{ done }}</span>
    </div>
    <div class="hilt-panel filters" role="search">
      <label v-for="menu in menus" :key="menu.name"><span>{{ w("episodes." + menu.name) }}</span>
        <select :value="value(menu.name)" @change="choose(menu.name, $event.target.value)">
          <option value="">{{ w("episodes.any") }}</option>
          <option v-for="[value, text] in menu.values" :key="value" :value="value">{{ text }}</option>
        </select></label>
      <button v-if="filter" type="button" class="hilt-button clear" @click="apply('')">{{ w("episodes.clear") }}</button>
      <label class="wide hilt-filter"><span>{{ w("episodes.filter") }}</span>
        <input type="search" v-model="typed" @change="apply(typed)" @keydown.enter="apply(typed)" @keydown.esc.prevent="$event.target.blur()" spellcheck="false"
          :aria-invalid="!!error" placeholder="success=false source=human steps>=100" :title="w('episodes.filter_help')"></label>
      <p class="hint hilt-soft">{{ w("episodes.filter_help") }}</p>
    </div>
    <div class="hilt-row views">
      <button type="button" class="hilt-button quick-filter" :aria-pressed="value('source') === 'human'" @click="choose('source', value('source') === 'human' ? '' : 'human')">{{ w("episodes.taken_over") }}</button>
      <span v-if="page && page.views.length" class="hilt-soft">{{ w("episodes.saved") }}</span>
      <span v-for="view in page ? page.views : []" :key="view.name" class="view">
        <button type="button" @click="show(view)">{{ view.name }}</button>
        <button v-if="!readonly" type="button" :aria-label="f('episodes.forget', {name: view.name})" @click="forget(view.name)">×</button>
      </span>
      <form v-if="!readonly" class="hilt-row" @submit.prevent="save">
        <input v-model="saving" maxlength="100" :placeholder="w('episodes.view_name')" :aria-label="w('episodes.view_name')">
        <button class="hilt-button" :disabled="!saving.trim()">{{ w("episodes.save") }}</button>
      </form>
      <button type="button" class="hilt-button" :aria-expanded="exporting" @click="exporting = !exporting; ask()">{{ w("episodes.export") }}</button>
      <button type="button" class="hilt-button" :disabled="chosen.size !== 2" @click="beside">{{ w("episodes.beside") }}</button>
    </div>
    <div v-if="exporting" class="hilt-panel hilt-stack export">
      <label class="hilt-row"><span>{{ chosen.size ? f("episodes.to_selected", {count: n(chosen.size)}) : f("episodes.to", {matched: page ? n(page.matched) : "…"}) }}</span>
        <select v-model="to" @change="ask()"><option v-for="name in formats" :key="name">{{ name }}</option></select></label>
      <p v-if="commandError" class="hilt-alarm">{{ commandError }}</p>
      <div v-for="command in commands" :key="command" class="hilt-do"><div class="hilt-command"><code>{{ command }}</code>
          <button type="button" class="hilt-tool" :aria-label="w('episodes.copy')" @click="copy($event)"><q-icon name="content_copy"/></button></div>
        <button v-if="!readonly && runnable.includes(command)" type="button" class="hilt-button run" :disabled="started?.code === null" @click="run(command)">{{ w("command.run") }}</button></div>
      <pre v-if="started" class="hilt-output" role="status">{{ output }}</pre>
      <template v-if="where.length"><p class="hilt-soft">{{ w(chosen.size && all === null ? "episodes.where_selected" : "episodes.where") }}</p>
        <div v-for="command in where" :key="command" class="hilt-command where"><code>{{ command }}</code>
          <button type="button" class="hilt-tool" :aria-label="w('episodes.copy')" @click="copy($event)"><q-icon name="content_copy"/></button></div></template>
    </div>
    <p v-if="error" class="hilt-alarm" role="alert">{{ error }}</p>
    <p v-for="(problem, path) in page ? page.problems : {}" :key="path" class="hilt-alarm">{{ path }}: {{ problem }}</p>
    <p v-if="page" class="legend hilt-soft"><span v-if="editing" class="keys"><kbd>J</kbd> <kbd>K</kbd> {{ w("episodes.key_move") }}
      <kbd>S</kbd> {{ w("episode.do_success") }} <kbd>F</kbd> {{ w("episode.do_failure") }} <kbd>?</kbd> {{ w("episodes.all_keys") }}</span>{{ w("episodes.who") }}: <span v-for="source in acted" :key="source"><i :class="source"></i>{{ w("episodes." + source) }}</span></p>
    <div v-if="page" class="hilt-panel list" @click.capture="mark">
      <table>
        <thead><tr>
          <th v-for="[name, sorted] in columns" :key="name" :class="[name, {right: right(name)}]"
              :aria-sort="sorted && sort === sorted ? (descending ? 'descending' : 'ascending') : null">
            <input v-if="name === 'number'" type="checkbox" :checked="wholePage" :disabled="!page.rows.length" :aria-label="w('episodes.select_page')" @click="pickPage">
            <button v-if="sorted" type="button" @click="order(sorted)">{{ w("episodes." + name) }}<i>{{ sort === sorted ? (descending ? "▼" : "▲") : "" }}</i></button>
            <span v-else>{{ w("episodes." + name) }}</span></th>
        </tr></thead>
        <tbody>
          <tr v-for="(row, place) in drawnRows" :key="id(row)" :data-place="place" :class="{at: place === at, picked: picked(row), bad: row.bad}">
            <td class="frames"><a :href="href(row)" tabindex="-1" aria-hidden="true">
              <img v-for="step in [0, -1]" :key="step" loading="lazy" alt="" :src="frame(row, step)" @error="$event.target.classList.add('none')"></a></td>
            <td class="number right" @mousedown="$event.shiftKey && $event.preventDefault()"><input type="checkbox" :checked="picked(row)"
              :aria-label="f('episodes.select', {number: row.number})" @click="pick(row, $event.shiftKey)">
              <a :href="href(row)">{{ row.number }}<template v-if="row.lane">·{{ row.lane }}</template></a></td>
            <td class="task"><a :href="href(row)">{{ row.task || "–" }}</a>
              <div v-if="row.instruction && row.instruction !== row.task" class="hilt-soft">{{ row.instruction }}</div>
              <div v-if="page.menus.group.length > 1" class="hilt-soft">{{ row.group }}</div>
              <div v-if="row.problem" class="problem">{{ row.problem }}</div></td>
            <td class="length right">{{ row.length }}</td>
            <td class="return right">{{ row.return === null ? "" : +row.return.toPrecision(4) }}</td>
            <td class="success"><span class="hilt-state" :class="outcome(row)[0]">{{ outcome(row)[1] }}</span>
              <span v-if="!readonly && page.format === 'log'" class="quick" role="group" :aria-label="f('episodes.label', {number: row.number})">
                <button type="button" class="hilt-button" :aria-label="w('episode.do_success')" :aria-pressed="row.success === true" @click="tap('success', row)">✓</button>
                <button type="button" class="hilt-button" :aria-label="w('episode.do_failure')" :aria-pressed="row.success === false" @click="tap('failure', row)">✗</button></span></td>
            <td class="who"><span v-if="row.read" class="whobar" role="img" :aria-label="who(row)" :title="who(row)">
              <i v-for="source in sources" :key="source" :class="source" :style="{flexGrow: row.sources[source] || 0}"></i></span></td>
            <td class="version right" :title="row.version === null ? '' : 'version=' + row.version">{{ versions(row) }}</td>
            <td class="date">{{ row.date === null ? "" : date(row.date) }}</td>
            <td class="tags"><span v-if="row.bad" class="hilt-chip">{{ w("episodes.bad") }}</span>
              <button v-for="tag in row.tags" :key="tag" type="button" class="hilt-chip" @click="choose('tag', tag)">{{ tag }}</button></td>
          </tr>
        </tbody>
      </table>
      <p v-if="!page.rows.length && !page.opening" class="hilt-soft none">{{ page.total ? w("episodes.none") : w("episodes.no_episode") }}</p>
    </div>
    <div v-if="page && chosen.size" class="hilt-panel hilt-stack selection" role="group" :aria-label="w('episodes.selection')">
      <div class="hilt-row">
        <b>{{ f("episodes.selected", {count: n(chosen.size)}) }}</b>
        <button v-if="all === null && page.matched > page.rows.length" type="button" class="hilt-button all" @click="pickAll">{{ f("episodes.select_all", {matched: n(page.matched)}) }} <kbd>A</kbd></button>
        <button type="button" class="hilt-button unselect" @click="unpick">{{ w("episodes.unselect") }} <kbd>Esc</kbd></button>
      </div>
      <div v-if="editing" class="hilt-row">
        <button v-for="[action, text, key] in bulk" :key="action" type="button" class="hilt-button" :class="action" @click="many(action)">{{ w(text) }} <kbd v-if="key">{{ key }}</kbd></button>
        <form class="hilt-row" @submit.prevent="tagMany"><input ref="tag" v-model="tagName" maxlength="100" :placeholder="w('episode.tag_name')" :aria-label="w('episode.tag_name')"
            @change="askBulk" @keydown.esc.stop="$event.target.blur()">
          <button class="hilt-button" :disabled="!tagName.trim()">{{ w("episode.do_tag") }} <kbd>T</kbd></button></form>
        <button type="button" class="hilt-button delete" @click="remove">{{ w("episode.do_delete") }}</button>
        <button type="button" class="hilt-button undo" @click="edit('undo')">{{ w("episode.do_undo") }} <kbd>Z</kbd></button>
        <button type="button" class="hilt-button in-terminal" :aria-expanded="bulkShown" @click="bulkShown = !bulkShown; askBulk()">{{ w("episodes.in_terminal") }}</button>
      </div>
      <div v-if="asking" class="hilt-row asking" role="alertdialog" :aria-label="asking"><b>{{ asking }}</b>
        <button ref="yes" type="button" class="hilt-button" @click="answer(true)">{{ w("episode.confirm") }} <kbd>Enter</kbd></button>
        <button type="button" class="hilt-button" @click="answer(false)">{{ w("episode.cancel") }} <kbd>Esc</kbd></button></div>
      <template v-if="bulkShown && editing">
        <p v-if="bulkError" class="hilt-alarm">{{ bulkError }}</p>
        <div v-for="command in bulkCommands" :key="command" class="hilt-command"><code>{{ command }}</code>
          <button type="button" class="hilt-tool" :aria-label="w('episodes.copy')" @click="copy($event)"><q-icon name="content_copy"/></button></div>
      </template>
    </div>
    <nav v-if="page && page.matched > count" class="hilt-row pages" :aria-label="w('episodes.pages')">
      <button type="button" class="hilt-button" :disabled="!first" @click="turn(-1)">{{ w("episodes.previous") }}</button>
      <span>{{ f("episodes.range", {first: first + 1, last: Math.min(first + count, page.matched), matched: n(page.matched)}) }}</span>
      <button type="button" class="hilt-button" :disabled="first + count >= page.matched" @click="turn(1)">{{ w("episodes.next") }}</button>
    </nav>
  </div>`,
  computed: {
    columns: () => COLUMNS,
    sources: () => SOURCES,
    listed() { return this.query({}).toString(); }, // the same for every row
    acted() { return SOURCES.filter((source) => source !== "random" || this.page.rows.some((row) => row.sources.random)); },
    drawnRows() { return this.page.rows.slice(0, this.drawn); },
    bulk: () => BULK,
    editing() { return !this.readonly && this.page?.format === "log"; },
    wholePage() { return !!this.page.rows.length && this.page.rows.every((row) => this.picked(row)); },
    formats: () => ["lerobot", "rlds", "robomimic", "hil-serl", "rlinf", "log"],
    menus() {
      const menus = this.page?.menus || {task: [], tag: [], group: []};
      const same = (values) => values.map((value) => [value, value]);
      return [
        {name: "task", values: same(menus.task)},
        {name: "success", values: [["true", this.w("episodes.yes")], ["false", this.w("episodes.no")], ["unknown", this.w("episodes.unknown")]]},
        {name: "source", values: SOURCES.map((source) => [source, this.w("episodes." + source)])},
        {name: "tag", values: same(menus.tag)},
        {name: "group", values: same(menus.group)},
      ].filter((menu) => menu.values.length > (menu.name === "group" ? 1 : 0) || this.value(menu.name));
    },
    output() {
      const {text, lines, code} = this.started, ended = code === null ? "…" : this.f("command.ended", {code});
      return ["$ " + text, ...lines, ended].join("\n");
    },
    status() {
      const page = this.page;
      if (!page || page.opening) return this.w("episodes.opening");
      const text = this.f("episodes.count", {matched: this.n(page.matched), total: this.n(page.total)});
      return page.unread ? text + " · " + this.f("episodes.unread", {unread: this.n(page.unread)}) : text;
    },
  },
  methods: {
    w(key) { return this.words[key] ?? key; },
    f(key, values) { return this.w(key).replace(/\{(\w+)\}/g, (_, name) => values[name]); },
    versions(row) { return versions(row, (start) => this.f("episodes.started", {start})); },
    n: whole,
    id: (row) => `${row.source}:${row.number}:${row.lane}`,
    right: (name) => RIGHT.includes(name),
    date: (seconds) => Date.parse(new Date(seconds * 1000)) ? `${new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC` : `${seconds}`,
    outcome(row) {
      if (row.problem) return ["died", this.w("episodes.damaged")];
      if (row.success === null) return ["unknown", this.w("episodes.unknown")];
      return row.success ? ["learning", this.w("episodes.yes")] : ["died", this.w("episodes.no")];
    },
    who(row) {
      return SOURCES.filter((source) => row.sources[source])
        .map((source) => `${this.w("episodes." + source)} ${Math.round((100 * row.sources[source]) / Math.max(1, row.length))}%`).join(", ");
    },
    query(more) {
      const values = {data: this.data, filter: this.filter, sort: this.sort, descending: this.descending ? 1 : 0, ...more};
      return new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== 0 && value !== undefined));
    },
    href(row) { return `/episode?${this.listed}&source=${row.source}&number=${row.number}` + (row.lane ? `&lane=${row.lane}` : ""); },
    frame(row, step) {
      return `/episodes/frame?data=${this.data}&source=${row.source}&number=${row.number}&lane=${row.lane}&step=${step}&height=54&steps=${row.length}`;
    },
    // The value of a condition with =, for its menu.
    value(name) {
      const found = conditions(this.filter).map((one) => one.replaceAll(/["']/g, "")).find((one) => one.startsWith(name + "="));
      return found ? found.slice(name.length + 1) : "";
    },
    choose(name, value) {
      const others = conditions(this.filter).filter((one) => !one.replaceAll(/["']/g, "").startsWith(name + "="));
      this.apply([...others, ...(value ? [quoted(`${name}=${value}`)] : [])].join(" "));
    },
    apply(text) {
      if (text === this.filter && !this.error) return;
      [this.filter, this.typed, this.first, this.at] = [text, text, 0, -1];
      this.unpick(); // an edit of many is one of episodes that this filter shows
      this.load();
    },
    order(name) {
      [this.descending, this.sort, this.first] = [this.sort === name ? !this.descending : name !== "task" && name !== "number", name, 0];
      this.load();
    },
    turn(by) {
      const last = Math.max(0, Math.ceil((this.page?.matched || 0) / this.count) - 1) * this.count;
      [this.first, this.at] = [Math.min(last, Math.max(0, this.first + by * this.count)), -1];
      this.load();
      window.scrollTo({top: 0});
    },
    show(view) {
      [this.sort, this.descending] = [view.sort, view.descending];
      this.filter = null;
      this.apply(view.filter);
    },
    async load(quiet) {
      clearTimeout(this.timer);
      const number = (this.asked = (this.asked || 0) + 1);
      if (!quiet) {
        history.replaceState(null, "", "/episodes?" + this.query({first: this.first}));
        this.waiting = setTimeout(() => (this.slow = true), 300);
      }
      const begun = performance.now();
      try {
        const early = window.hiltFirstList; // what the page has asked for before this script was there
        window.hiltFirstList = null;
        const answer = await (early ?? fetch("/episodes/list?" + this.query({first: this.first, count: this.count})).then((one) => one.json()));
        if (number !== this.asked) return;
        this.error = answer.error || "";
        if (!answer.error) {
          const held = this.page?.rows[this.at] && this.id(this.page.rows[this.at]);
          this.draw(answer.rows);
          this.page = answer;
          const now = answer.rows.findIndex((row) => this.id(row) === held);
          if (now >= 0) this.at = now;
        }
        this.took = performance.now() - begun;
      } catch {
        this.error = this.w("episodes.offline");
      } finally {
        clearTimeout(this.waiting);
        this.slow = false;
      }
      // What is being opened or read comes soon; a log may grow at any time.
      // The server itself waits a little for what is being opened.
      this.timer = setTimeout(() => this.load(true), this.page?.opening ? 50 : this.page?.unread ? 800 : 4000);
    },
    // What is exported: the selected episodes, or without any what the filter shows.
    exported() {
      const selected = this.chosen.size ? {episodes: this.grouped(), ...(this.all === null ? {} : {where: this.all})} : {};
      return {data: this.data, filter: this.filter, to: this.to, ...selected};
    },
    // Vue need not watch each value of a row, which is replaced as a whole. Of other rows than before, a screen is drawn first.
    draw(rows) {
      rows.forEach((row) => (row.__v_skip = true));
      const before = this.page?.rows[0] && this.id(this.page.rows[0]), same = rows.length && this.id(rows[0]) === before;
      this.drawn = same && this.drawn >= this.count ? this.count : FIRST_ROWS;
      if (this.drawn < this.count) requestAnimationFrame(() => setTimeout(() => (this.drawn = this.count)));
    },
    async ask() {
      if (!this.exporting) return;
      const asked = (this.exportAsked = (this.exportAsked || 0) + 1), answer = await post("/episodes/export", this.exported());
      if (asked !== this.exportAsked) return; // something else was selected meanwhile
      [this.commands, this.where, this.commandError] = [answer.commands || [], answer.where || [], answer.error || ""];
      [this.runnable, this.started] = [answer.runnable || [], answer.started || null];
      clearTimeout(this.exportTimer);
      if (this.started?.code === null) this.exportTimer = setTimeout(() => this.ask(), 1000);
    },
    async run(command) {
      const answer = await post("/episodes/run", {...this.exported(), command});
      await this.ask();
      this.commandError = answer.error || this.commandError;
    },
    async send(body) {
      const answer = await (await fetch("/episodes/views", {method: "POST", body: JSON.stringify(body)})).json();
      this.error = answer.error || "";
      if (answer.views) this.page.views = answer.views;
    },
    async save() {
      await this.send({name: this.saving.trim(), filter: this.filter, sort: this.sort, descending: this.descending});
      if (!this.error) this.saving = "";
    },
    forget(name) { this.send({remove: name}); },
    copy(event) { window.hiltCopy(event.currentTarget); },
    picked(row) { return this.chosen.has(this.id(row)); },
    // One row, or with `ranged` all from the row that was chosen last up to this one, become what this one becomes.
    pick(row, ranged) {
      const rows = this.page.rows, [from, to] = [this.anchor, this.id(row)].map((name) => rows.findIndex((one) => this.id(one) === name));
      const some = ranged && from >= 0 ? rows.slice(Math.min(from, to), Math.max(from, to) + 1) : [row];
      this.anchor = this.id(row);
      this.choosing(some, !this.picked(row));
    },
    pickPage() { this.choosing(this.page.rows, !this.wholePage); },
    choosing(rows, is) {
      const next = new Set(this.chosen);
      for (const row of rows) next[is ? "add" : "delete"](this.id(row));
      [this.chosen, this.all, this.asking] = [next, null, ""];
      this.askBulk();
      this.ask();
    },
    async pickAll() {
      const filter = this.filter, answer = await (await fetch("/episodes/all?" + this.query())).json();
      this.error = answer.error || "";
      if (answer.error || filter !== this.filter) return;
      [this.chosen, this.all, this.asking] = [new Set(answer.ids), filter, ""];
      this.askBulk();
      this.ask();
    },
    unpick() {
      [this.chosen, this.all, this.asking, this.anchor, this.bulkCommands] = [new Set(), null, "", null, []];
      this.ask();
    },
    // What is selected, as the numbers of each source.
    grouped() {
      const out = {};
      for (const name of this.chosen) {
        const [source, number] = name.split(":");
        (out[source] ??= []).push(+number);
      }
      return out;
    },
    async askBulk() {
      if (!this.bulkShown || !this.chosen.size) return;
      const body = {data: this.data, commands: true, episodes: this.grouped(), name: this.tagName.trim(), ...(this.all === null ? {} : {where: this.all})};
      const chosen = this.chosen, answer = await post("/episodes/many", body);
      if (chosen === this.chosen) [this.bulkCommands, this.bulkError] = [answer.commands || [], answer.error || ""];
    },
    // One edit of all that are selected, which is undone as one.
    many(action, name) {
      if (!this.editing || !this.chosen.size) return;
      const episodes = this.grouped();
      this.queue = (this.queue ?? Promise.resolve()).then(() => this.labelMany(action, name, episodes)).catch(() => ([this.done, this.error] = ["", this.w("episodes.offline")]));
    },
    async labelMany(action, name, episodes) {
      [this.done, this.error] = ["…", ""];
      const answer = await post("/episodes/many", {data: this.data, episodes, action, name, author: localStorage.getItem("hilt-author") || ""});
      const {edits = [], count} = answer;
      if (edits.length) keepMade([...made(), {data: this.data, several: edits, action: answer.text, count}]);
      this.done = edits.length ? "✓ " + this.f("episodes.saved_many", {action: answer.text, count: this.n(count)}) : "";
      if (action === "delete" && !answer.error) this.unpick();
      await this.load(true);
      this.error = answer.error || this.error;
    },
    tagMany() { const name = this.tagName.trim(); this.tagName = ""; document.activeElement?.blur(); this.many("tag", name); },
    remove() {
      this.asking = this.f("episodes.ask_delete", {count: this.n(this.chosen.size)});
      this.$nextTick(() => this.$refs.yes?.focus());
    },
    answer(yes) { this.asking = ""; if (yes) this.many("delete"); },
    // Of those that are selected and seen, all are bad already: B makes them good again.
    toggleBad() {
      const seen = this.page.rows.filter((row) => this.picked(row));
      this.many(seen.length && seen.every((row) => row.bad) ? "good" : "bad");
    },
    beside() {
      const [one, other] = [...this.chosen].map((name) => name.split(":"));
      location.href = "/episode?" + this.query({source: one[0], number: one[1], lane: one[2], beside: other.join(":")});
    },
    // One edit of the row with the bar, which goes on to the next one at once; edits are sent one after the other.
    edit(action) {
      const row = this.page?.rows[this.at];
      if (action !== "undo" && this.chosen.size) { this.many(action); return; }
      if ((!row && action !== "undo") || this.readonly) return;
      if (action !== "undo") { this.at = Math.min(this.page.rows.length - 1, this.at + 1); this.scroll(); }
      this.queue = (this.queue ?? Promise.resolve()).then(() => this.label(action, row)).catch(() => ([this.done, this.error] = ["", this.w("episodes.offline")]));
    },
    // The same with a finger, which chooses the row itself.
    tap(action, row) {
      this.queue = (this.queue ?? Promise.resolve()).then(() => this.label(action, row)).catch(() => ([this.done, this.error] = ["", this.w("episodes.offline")]));
    },
    async label(action, row) {
      if (action === "undo") return this.undoLast();
      const {source, number, lane} = row, author = localStorage.getItem("hilt-author") || "";
      const answer = await post("/episodes/edit", {data: this.data, source, number, lane, action, author});
      this.error = answer.error || "";
      if (answer.error) return;
      keepMade([...made(), {data: this.data, source, number, lane, edit: answer.edit.number, action: answer.edit.text}]);
      this.done = "✓ " + this.f("episode.saved", {action: answer.edit.text});
      this.put(row, answer.row);
    },
    async undoLast() {
      const edits = made(), last = edits.pop();
      if (!last) { this.done = this.w("episode.nothing_to_undo"); return; }
      const answer = await undoMade(last, localStorage.getItem("hilt-author") || "");
      this.error = answer.error || "";
      keepMade(edits);
      if (answer.error && !answer.count) return;
      this.done = "✓ " + this.f(last.several ? "episodes.undid_many" : "episode.undid", {...last, count: this.n(answer.count ?? 1)});
      if (last.several) await this.load(true);
      else this.put(last, answer.row);
      this.error = answer.error || this.error;
    },
    // What an episode is now, in its place.
    put({source, number, lane}, row) {
      const shown = this.page.rows.findIndex((one) => one.source === source && one.number === number && one.lane === lane);
      if (shown >= 0 && row) this.page.rows[shown] = Object.assign(row, {__v_skip: true});
      else this.load(true);
    },
    scroll() { this.$nextTick(() => this.$el.querySelector("tr.at")?.scrollIntoView({block: "nearest"})); },
    mark(event) {
      const row = event.target.closest("tr[data-place]");
      if (row) this.at = +row.dataset.place;
    },
    key(event) {
      if (event.target.closest("input:not([type=checkbox]), select, textarea, dialog[open]") || event.ctrlKey || event.metaKey || event.altKey) return;
      const arrows = {ArrowDown: "j", ArrowUp: "k"};
      if (this.asking) {
        if (event.key === "Enter" || event.key === "Escape") { event.preventDefault(); this.answer(event.key === "Enter" && !event.target.closest(".asking button:not(:first-of-type)")); }
        return;
      }
      const rows = this.page?.rows || [], key = arrows[event.key] || (event.key.length === 1 ? event.key.toLowerCase() : event.key);
      if (key === "j" || key === "k") {
        this.at = Math.min(rows.length - 1, Math.max(0, this.at + (key === "j" ? 1 : -1)));
        this.scroll();
      } else if (key === "Enter" && rows[this.at] && !event.target.closest("button, a")) location.href = this.href(rows[this.at]);
      else if (key === "x" && rows[this.at]) this.pick(rows[this.at], event.shiftKey);
      else if (key === "a") this.pickAll();
      else if (key === "Escape" && this.chosen.size) this.unpick();
      else if (key === "t" && this.$refs.tag) this.$refs.tag.focus();
      else if (key === "Delete" && this.chosen.size && this.editing) this.remove();
      else if ("sfu".includes(key) && (this.chosen.size || rows[this.at])) this.edit({s: "success", f: "failure", u: "unknown"}[key]);
      else if (key === "b" && this.chosen.size) this.toggleBad();
      else if (rows[this.at] && key === "b") this.edit(rows[this.at].bad ? "good" : "bad");
      else if (key === "z") this.edit("undo");
      else if (key === "n") this.turn(1);
      else if (key === "p") this.turn(-1);
      else return;
      event.preventDefault();
    },
  },
  mounted() {
    this.$el.component = this;
    const query = new URLSearchParams(location.search);
    [this.filter, this.typed] = [query.get("filter") || "", query.get("filter") || ""];
    [this.sort, this.descending] = [query.get("sort") || "number", query.get("descending") === "1"];
    this.first = +query.get("first") || 0;
    document.addEventListener("keydown", (this.listener = (event) => this.key(event)));
    this.load();
  },
  unmounted() {
    clearTimeout(this.timer);
    clearTimeout(this.exportTimer);
    document.removeEventListener("keydown", this.listener);
  },
};
