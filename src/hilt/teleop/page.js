// The page, as a Vue component of NiceGUI's: draws what the page's process sends, and sends what the person holds and presses.
// On a page of its own, or on one of the app of `hilt open`, which passes on what goes through the socket, gives words of another
// language for the texts here, and lets people watch who may not drive.
// Whole states and no changes are sent, 20 times a second: a lost message costs 50 ms, and silence means that contact is gone.

const PERIOD = 50; // ms between two states
const SHORTEST = 150; // ms that a tapped key counts as held, so that a control step sees it
const SILENT = 1000; // ms without a word of the page's process, which speaks every 100, after which contact is gone
const FROZEN = 400; // ms without a turn after which nobody knows which keys are still held
const TOLD = 4000; // ms that a hint stays in sight
const LATE = 3000; // ms after which a press that could not be sent is dropped, but for stop
const AWAY = 4404; // the code with which the app closes the socket when there is no actor
const AXES = ["x", "y", "z", "roll", "pitch", "yaw"];
const NAMES = {enter: "Enter", backspace: "⌫", escape: "Esc", tab: "Tab", " ": "Space"};
const ALWAYS = ["stop", "estop"]; // presses that count however late they are sent, and whoever drives
const LEGEND = [
  ["Forward, back", "+x", "-x"], ["Roll", "+roll", "-roll"], ["Left, right", "+y", "-y"], ["Pitch", "+pitch", "-pitch"],
  ["Up, down", "+z", "-z"], ["Yaw", "+yaw", "-yaw"], ["Close, open", "close", "open"], ["Take over", "toggle"],
  ["Success", "success"], ["Fail", "fail"], ["Reset", "reset"], ["Stop", "stop"],
  ["Emergency stop", "estop"], ["Release it", "release_estop"],
];
const PAD_LEGEND = [
  ["Move", "Left stick"], ["Up, down, turn", "Right stick"], ["Pitch, roll", "Cross"], ["Open, close", "LT", "RT"], ["Take over", "Start"],
  ["Success", "A"], ["Fail", "B"], ["Reset", "X"], ["Stop", "Back"],
  ["Emergency stop", "LB"], ["Release it", "L3"],
];
// Of a gamepad, by the numbers of the browser's standard layout; the same as in gamepad.py.
const BUTTONS = {0: "success", 1: "fail", 2: "reset", 3: "arm", 4: "estop", 8: "stop", 9: "toggle", 10: "release_estop"};
const clamp = (value) => Math.max(-1, Math.min(1, value));
// What the browser keeps for us; nothing where it may not.
const remember = (where, name, value) => { try { window[where].setItem(name, JSON.stringify(value)); } catch {} };
const recall = (where, name) => { try { return JSON.parse(window[where].getItem(name)); } catch { return null; } };
const seconds = () => performance.now() / 1000;

// A stick for finger or mouse. It springs back when it is let go, whatever ends the touch.
const Stick = {
  props: ["label", "up", "down", "left", "right"],
  emits: ["moved"],
  data: () => ({x: 0, y: 0, pointer: null}),
  template: `
    <div class="stick" :class="{on: pointer !== null}" role="group" :aria-label="label"
        @pointerdown.prevent="grab" @pointermove="drag" @pointerup="drop" @pointercancel="drop" @lostpointercapture="drop">
      <i class="up">{{ up }}</i><i class="down">{{ down }}</i><i class="left">{{ left }}</i><i class="right">{{ right }}</i>
      <b :style="{transform: 'translate(' + 100 * x + '%,' + 100 * y + '%)'}"></b>
    </div>`,
  methods: {
    grab(event) {
      if (this.pointer !== null) return;
      this.pointer = event.pointerId;
      this.$el.setPointerCapture(event.pointerId);
      this.drag(event);
    },
    drag(event) {
      if (event.pointerId !== this.pointer) return;
      const box = this.$el.getBoundingClientRect();
      const [x, y] = [(event.clientX - box.x) / box.width, (event.clientY - box.y) / box.height].map((part) => (part - 0.5) * 2.6);
      const far = Math.max(1, Math.hypot(x, y));
      this.set(x / far, y / far);
    },
    drop(event) {
      if (event && event.pointerId !== this.pointer) return;
      this.pointer = null;
      this.set(0, 0);
    },
    set(x, y) {
      [this.x, this.y] = [x, y];
      const rest = (value) => (Math.abs(value) < 0.12 ? 0 : value);
      this.$emit("moved", rest(x), rest(-y)); // to the right and up
    },
  },
};

export default {
  components: {Stick},
  props: {keys: Object, words: Object, path: {type: String, default: "/drive"}, watch: Boolean},
  template: `
    <div class="hilt" :class="[mood, {nudged: hint, watch}]">
      <header>
        <b class="brand">Hilt</b>
        <span class="instruction" :title="status.instruction">{{ status.instruction || w("No instruction") }}</span>
        <span class="link" :class="quality" :title="w('Age of the newest picture')">{{ linkText }}</span>
      </header>
      <section class="who" role="status" aria-live="assertive"><strong>{{ who[0] }}</strong><span>{{ who[1] }}</span></section>
      <section class="cameras" :class="{stale: quality === 'bad'}" :style="{'--columns': cameras.length === 4 ? 2 : Math.min(3, cameras.length)}">
        <figure v-for="name in cameras" :key="name"><canvas :data-camera="name"></canvas><figcaption>{{ name }}</figcaption></figure>
        <b v-if="outcome" :key="outcome" class="outcome" :class="{kept: outcome.startsWith('Recorded')}">{{ outcome }}</b>
        <p v-if="!cameras.length">{{ away ? "" : !online ? w("Connecting") : age === null ? w("Waiting for the first picture") : w("This task has no pictures") }}</p>
      </section>
      <aside>
      <section class="facts">
        <dl>
          <div><dt>{{ w("Episode") }}</dt><dd class="episode">{{ status.episode || 0 }}<small v-if="status.episodes_left != null" :title="w('About as many episodes as the run will have')"> / ≈{{ status.episode + status.episodes_left }}</small></dd></div>
          <div><dt>{{ w("Successes") }}</dt><dd class="successes">{{ status.successes || 0 }}</dd></div>
          <div><dt>{{ w("Step") }}</dt><dd class="step">{{ status.step || 0 }}<small v-if="status.step_limit"> / {{ status.step_limit }}</small></dd></div>
          <div><dt>{{ w("Reward") }}</dt><dd>{{ +(status.reward || 0).toFixed(2) }}</dd></div>
          <div v-if="status.confidence != null" :title="w('The share of its plans so far of which the policy was less sure')"><dt>{{ w("Confidence") }}</dt><dd class="confidence">{{ Math.round(100 * status.confidence) }}%</dd></div>
          <div v-if="status.success_probability != null" :class="{alarm: status.alarm}" :title="w('The probability that this episode succeeds, by the value model')"><dt>{{ w("Expected") }}</dt><dd class="expected">{{ Math.round(100 * status.success_probability) }}%</dd></div>
          <div v-if="view.viewers > 1 || (status.confidence == null && status.success_probability == null)"><dt>{{ w("Viewers") }}</dt><dd>{{ view.viewers || 0 }}</dd></div>
        </dl>
        <progress :max="status.step_limit || 1" :value="status.step_limit ? status.step : 0"></progress>
        <p v-if="status.message || note" class="message">{{ note || status.message }}</p>
      </section>
      <section v-if="!watch && view.pausing" class="marks rewind" role="group" :aria-label="w('Go back to an earlier moment')">
        <label>{{ w("Step {step} of {last}", {step: chosen, last: status.step}) }}
          <input type="range" :min="view.moments" :max="status.step" step="1" :value="chosen" @input="moment = +$event.target.value" @change="$event.target.blur()"></label>
        <button class="again mine" @click="goOn(true)">{{ chosen < status.step ? w("Try again from here") : w("Go on") }}: {{ w("I drive") }}</button>
        <button class="again" @click="goOn(false)">{{ chosen < status.step ? w("Try again from here") : w("Go on") }}: {{ w("the policy") }}</button>
      </section>
      <section v-if="!watch && !view.pausing" class="marks">
        <button class="success" :disabled="!mayJudge" @click="press('success')"><q-icon name="check"/>{{ w("Success") }}</button>
        <button class="fail" :disabled="!mayJudge" @click="press('fail')"><q-icon name="close"/>{{ w("Fail") }}</button>
        <button class="reset" :disabled="!mayMark" @click="press('reset')"><q-icon name="replay"/>{{ w("Reset") }}</button>
        <button v-if="status.rewind" class="pause" :disabled="!mayMark || view.paused" @click="press('pause')" :title="w('Pause the simulation, and go back to an earlier moment (P)')">
          <q-icon name="pause"/>{{ w("Pause") }}</button>
      </section>
      <section v-if="!watch" class="hands" :class="{idle: !view.driving}">
        <div v-if="view.arms > 1" class="choice" role="group" :aria-label="w('Which arm')">
          <button v-for="(name, index) in [w('Left arm'), w('Right arm')]" :aria-pressed="arm === index" @click="choose('arm', index)">{{ name }}</button>
        </div>
        <div class="sticks">
          <stick ref="move" :label="w('Move')" :up="w('forward')" :down="w('back')" :left="w('left')" :right="w('right')" @moved="(...to) => moved('move', to)"></stick>
          <div class="middle"><span class="gripper">{{ gripper === undefined ? w("Gripper") : w("{count}% open", {count: Math.round(100 * gripper)}) }}</span>
            <button v-for="name in ['open', 'close']" :class="name" @pointerdown.prevent="hold(name, name)" @pointerup="letGo(name)"
                @pointercancel="letGo(name)" @pointerleave="letGo(name)">{{ name === "open" ? w("open") : w("close") }}</button>
          </div>
          <stick ref="lift" :label="tilt ? w('Tilt') : w('Lift and turn')" :up="tilt ? w('pitch') : w('up')" :down="tilt ? w('pitch') : w('down')"
              :left="tilt ? w('roll') : w('turn')" :right="tilt ? w('roll') : w('turn')" @moved="(...to) => moved('lift', to)"></stick>
        </div>
        <div class="speed">
          <label>{{ w("Speed") }} <input type="range" min="0.1" max="1" step="0.1" v-model.number="speed" @change="$event.target.blur()"> {{ Math.round(100 * speed) }}%</label>
          <span class="choice" role="group" :aria-label="w('What the right stick does')"><button v-for="on in [false, true]" :aria-pressed="tilt === on" @click="choose('tilt', on)">{{ on ? w("Tilt") : w("Lift") }}</button></span>
        </div>
        <div class="choice" role="group" :title="w('Which way is forward: as the robot looks, or into the picture of a camera that looks at the robot')">
          <button v-for="on in [false, true]" :aria-pressed="faces === on" @click="chooseFacing(on)">{{ on ? w("Facing the robot") : w("Behind the robot") }}</button>
        </div>
      </section>
      <section v-if="!watch" class="legend" :aria-label="padLegend ? w('Gamepad') : w('Keys')">
        <div v-if="pad" class="choice" role="group" :aria-label="w('Which legend')">
          <button v-for="on in [false, true]" :aria-pressed="padLegend === on" @click="choosePadLegend(on)">{{ on ? w("Gamepad") : w("Keys") }}</button>
        </div>
        <div v-for="[what, ...meanings] in legend"><span>{{ what }}</span><span><kbd v-for="key in meanings">{{ key }}</kbd></span></div>
        <p><template v-if="!padLegend">{{ w("Arrow keys move too.") + " " }}</template>{{ gamepad }}</p>
      </section>
      </aside>
      <footer v-if="!watch">
        <button class="take" :disabled="!online || (!view.driving && (over || view.taken))" @click="toggle">
          {{ view.driving ? w("Give back") : view.taken ? w("Taken") : w("Take over") }}</button>
        <button v-if="view.lost && !over" class="resume" @click="press('give')">{{ w("Let it go on") }}</button>
        <button class="stop" :disabled="away" @click="press('stop')"><q-icon name="stop"/>{{ w("Stop") }}</button>
        <button v-if="status.estop" class="release" :disabled="!mayMark" @click="press('release_estop')">{{ w("Release the emergency stop") }}</button>
        <button v-else class="estop" :disabled="away" @click="press('estop')"><q-icon name="dangerous"/>{{ w("Emergency stop") }}</button>
      </footer>
    </div>`,

  data: () => ({online: false, view: {}, cameras: [], age: null, period: 0, note: "", gamepad: "", pad: false, keysChosen: false, hint: "", layout: null, arm: 0, tilt: false, facing: null, speed: 1, ended: false, away: false, moment: null}),

  computed: {
    status() { return this.view.status || {}; },
    // How the last episode ended, in the recorder's words; and whether it has said its last one.
    outcome() { return this.status.message?.match(/^(Recorded|Dropped)[^.]*\./)?.[0]; },
    over() { return this.ended || !!this.status.message?.startsWith("Recording has ended"); },
    // The step at which a person looks who has paused: the newest, until they choose another one.
    chosen() { return this.moment ?? this.status.step ?? 0; },
    gripper() { return this.status.gripper?.[this.arm]; },
    // A camera of the name front looks at the robot, unless the person says otherwise.
    faces() { return this.facing ?? this.cameras.includes("front"); },
    mayJudge() { return this.mayMark && this.status.step > 0; },
    mayMark() { return this.online && (this.view.driving || !this.view.taken); },
    mood() {
      if (this.over) return "ended";
      if (this.away) return "away";
      if (!this.online) return "gone";
      if (this.status.estop) return "estop";
      if (this.view.lost && this.status.who !== "policy") return "lost";  // else the policy goes on, after a while
      if (this.view.paused) return "paused";
      if (this.view.taken) return this.view.driving ? "mine" : "other";
      return this.status.who === "policy" ? "policy" : "none";
    },
    who() {
      const held = this.status.message?.match(/Let go.*/)?.[0];
      const [title, text] = {
        ended: [this.status.message?.startsWith("Recording") ? this.status.message : this.w("The session has ended."), this.w("You may close this page.")],
        away: [this.w("The actor is not running"), this.w("It has ended, or is being started again. This page goes on by itself when it is back.")],
        gone: [this.w("No contact"), this.w("The arm holds still if you were driving. Trying again.")],
        estop: [this.w("Emergency stop"), this.w("Nothing moves until a person releases it. First see that it is safe.")],
        lost: [this.w("Contact lost"), this.w("The driver is gone and the arm holds still. Take over, or let it go on.")],
        paused: [this.w("Paused"), this.view.pausing ? this.w("Choose a moment with the slider or ← →, and try again from there.") : this.w("Somebody has paused the simulation.")],
        mine: [this.w("You are in control"), held || this.w("The arm moves while you hold a key or a stick.")],
        other: [this.w("Somebody else drives"), this.w("You are watching. Stop works for everybody.")],
        policy: [this.w("The policy is in control"), this.w("Take over when it needs you.")],
        none: [this.w("No one is in control"), this.w("The arm holds still. Take over to drive.")],
      }[this.mood];
      if (this.watch && !["away", "gone"].includes(this.mood)) return [title, this.w("You are watching. This app was opened to view only.")];
      return [title, this.hint || text];
    },
    // Of the gamepad where there is one, unless the person wants to see the keys.
    padLegend() { return this.pad && !this.keysChosen; },
    quality() { return !this.online || this.age === null || this.age > 1 ? "bad" : this.age > 0.2 ? "poor" : "good"; },
    linkText() {
      if (!this.online || this.age === null) return this.online ? this.w("no picture") : this.w("offline");
      return this.age > 1 ? this.w("picture {count} s old", {count: this.age.toFixed(0)}) : `${Math.round(1000 * this.age)} ms` + (this.period ? ` · ${Math.round(1 / this.period)} fps` : "");
    },
    legend() {
      if (this.padLegend) return (this.view.arms > 1 ? [...PAD_LEGEND, ["Other arm", "Y"]] : PAD_LEGEND).map(([what, ...parts]) => [what, ...parts].map((text) => this.w(text)));
      const shown = (meaning) => Object.keys(this.keys).find((key) => this.keys[key] === meaning);
      const printed = (key) => this.printed(key);
      const rows = this.view.arms > 1 ? [...LEGEND, ["Other arm", "arm"]] : LEGEND;
      const keys = rows.map(([what, ...meanings]) => [this.w(what), ...meanings.map((meaning) => printed(shown(meaning)))]);
      return this.status.rewind ? [...keys, [this.w("Pause"), printed("p")]] : keys;
    },
  },

  watch: {
    faces() { this.releaseAll(); }, // what is held would turn round
  },

  mounted() {
    // What changes with every message and is not shown stays out of Vue's sight.
    Object.assign(this, {held: new Map(), sticks: {move: [0, 0], lift: [0, 0]}, padHeld: [], rested: new Set(), unsent: []});
    Object.assign(this, {seen: 0, came: 0, drawn: 0, turned: 0, heard: 0});
    // A page that is reloaded comes back to its seat. It leaves its name when it goes and not before, or a copy of this tab would have it too.
    const name = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
    [this.viewer, this.number] = recall("sessionStorage", "hilt-seat") || [name, 0];
    remember("sessionStorage", "hilt-seat", null);
    window.addEventListener("pagehide", () => remember("sessionStorage", "hilt-seat", [this.viewer, this.number]));
    this.facing = recall("localStorage", "hilt-facing");
    this.ages = []; // of the pictures, in seconds, for whoever measures
    this.$el.cockpit = this;
    window.addEventListener("keydown", this.keyDown, true);
    window.addEventListener("keyup", (event) => this.letGo(event.code), true);
    for (const event of ["blur", "pagehide"]) window.addEventListener(event, this.releaseAll);
    for (const name of ["contextmenu", "dragstart"]) { // while a menu is open or something is dragged, nobody tells that a key is released
      window.addEventListener(name, (event) => { event.preventDefault(); this.releaseAll(); }, true);
    }
    document.addEventListener("visibilitychange", this.releaseAll);
    navigator.keyboard?.getLayoutMap?.().then((layout) => { this.layout = layout; }, () => {}); // for the legend only
    setInterval(this.turnOver, PERIOD);
    this.connect();
  },

  methods: {
    // A text of this file in the language of the page, with values in it.
    w(text, values = {}) {
      return (this.words?.[text] || text).replace(/{(\w+)}/g, (whole, name) => values[name] ?? whole);
    },

    connect() {
      const socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${this.path}`);
      socket.binaryType = "arraybuffer";
      this.socket = socket;
      this.heard = performance.now();
      socket.onopen = () => {
        this.seen = 0;
        socket.send(JSON.stringify({viewer: this.viewer}));
        this.unsent = this.unsent.filter((press) => ALWAYS.includes(press.event) || performance.now() - press.at < LATE);
        for (const press of this.unsent) socket.send(JSON.stringify(press));
        this.sendState();
      };
      socket.onmessage = (event) => this.receive(event.data);
      socket.onclose = (event) => {
        if (socket !== this.socket) return;
        this.ended = event.code === 1012; // told by a server that ends in order
        this.away = event.code === AWAY;
        if (this.away) this.unsent = []; // they were meant for an actor that is gone
        this.note = this.ended ? "" : event.reason;
        this.gone();
        setTimeout(() => this.connect(), 500);
      };
    },

    gone() {
      this.online = false;
      this.releaseAll();
    },

    async receive(data) {
      const came = seconds();
      this.heard = performance.now();
      const length = new DataView(data).getUint32(0, true);
      const view = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
      const trip = view.echo ? Math.max(0, came - view.echo - view.kept) : 0;
      if (this.view.driving && !view.driving) this.releaseAll();
      if (this.view.driving !== view.driving) this.hint = "";
      if (!view.pausing) this.moment = null;
      [this.view, this.online, this.ended, this.away] = [view, true, false, false];
      this.unsent = this.unsent.filter((press) => press.number > view.done);
      ++this.seen; // on this connection, for the page's process
      const number = ++this.came; // on all of them: a picture of the last connection is older than one of this
      if (view.pictures.length) await this.draw(view, data, 4 + length, number);
      if (view.age !== null) this.age = view.age + trip / 2 + seconds() - came;
      if (view.pictures.length) {
        this.ages = [...this.ages.slice(-399), this.age];
        if (this.drawn) this.period += (this.period ? 0.1 : 1) * (seconds() - this.drawn - this.period);
        this.drawn = seconds();
      }
      this.sendState();
    },

    async draw({pictures, status}, data, offset, number) {
      const names = pictures.map(([name]) => name);
      if (names.join() !== this.cameras.join()) {
        this.cameras = names;
        await this.$nextTick();
      }
      await Promise.all(pictures.map(async ([name, size]) => {
        const bytes = new Uint8Array(data, offset, size);
        offset += size;
        const picture = await createImageBitmap(new Blob([bytes], {type: "image/jpeg"}));
        const canvas = [...this.$el.querySelectorAll("canvas")].find((canvas) => canvas.dataset.camera === name);
        if (!canvas || canvas.number > number) return; // a newer one was quicker
        canvas.number = number;
        if (canvas.width !== picture.width || canvas.height !== picture.height) {
          [canvas.width, canvas.height] = [picture.width, picture.height];
          canvas.parentElement.style.setProperty("--ratio", picture.width / picture.height);
        }
        canvas.getContext("2d").drawImage(picture, 0, 0);
        for (const line of status.path?.[name] || []) this.drawPath(canvas, line, status.path_done);
      }));
    },

    // What the policy has planned: thin where the arm has been, bold where it will go, with a ring at its end.
    drawPath(canvas, line, done) {
      const pen = canvas.getContext("2d"), {width, height} = canvas, thick = Math.max(1.5, width / 110);
      const places = line.map(([x, y]) => [x * width, y * height]);
      const stroke = (from, to, style, size) => {
        if (to - from < 1) return;
        pen.beginPath();
        places.slice(from, to + 1).forEach(([x, y], index) => (index ? pen.lineTo(x, y) : pen.moveTo(x, y)));
        [pen.strokeStyle, pen.lineWidth, pen.lineCap, pen.lineJoin] = [style, size, "round", "round"];
        pen.stroke();
      };
      const last = places.length - 1;
      stroke(0, Math.min(done, last), "rgba(255, 255, 255, .6)", thick / 2);
      stroke(Math.min(done, last), last, "rgba(0, 0, 0, .6)", 2 * thick);
      stroke(Math.min(done, last), last, "#ffc02e", thick);
      if (last < 0) return;
      pen.beginPath();
      pen.arc(...places[last], 2 * thick, 0, 2 * Math.PI);
      [pen.strokeStyle, pen.lineWidth] = ["#ffc02e", thick];
      pen.stroke();
    },

    printed(key) { return NAMES[key] || (this.layout?.get(`Key${key.toUpperCase()}`) || key).toUpperCase(); },

    // Says for a while why what the person does has no effect.
    tell(hint) {
      [this.hint, this.toldAt] = [hint, performance.now()];
    },

    // Somebody who is not in control moves something: that does nothing, and is not passed over in silence.
    nudge() {
      if (this.watch || !this.online || this.over || this.view.driving) return;
      const key = this.printed(Object.keys(this.keys).find((key) => this.keys[key] === "toggle"));
      this.tell(this.view.taken ? this.w("Keys and sticks move nothing here: somebody else drives.") : this.w("Keys and sticks move nothing yet: press Take over ({key}) first.", {key}));
    },

    // Once every PERIOD.
    turnOver() {
      const now = performance.now(), patience = this.view.patience || 1;
      if (now - this.turned > patience * FROZEN && this.turned) {
        if (this.view.driving && this.held.size) this.tell(this.w("Let go, then press again: this page stood still, and nobody knew what you hold."));
        this.releaseAll();
      }
      this.turned = now;
      if (this.hint && now - this.toldAt > TOLD) this.hint = "";
      if (this.online && now - this.heard > patience * SILENT) this.gone();
      if (this.socket.readyState < WebSocket.CLOSING && now - this.heard > 3 * patience * SILENT) { // a dead network does not close it by itself
        this.socket.close();
        this.connect();
      }
      for (const [key, held] of this.held) if (held.until && held.until <= now) this.held.delete(key);
      this.readGamepad();
      this.sendState();
    },

    sendState() {
      // What waits in the browser would only grow old there.
      if (this.socket.readyState !== WebSocket.OPEN || this.socket.bufferedAmount > 2000) return;
      this.socket.send(JSON.stringify({sent: seconds(), seen: this.seen, moment: this.view.pausing && this.chosen < this.status.step ? this.chosen : -1, ...this.state()}));
    },

    state() {
      const motion = Object.fromEntries(AXES.map((axis) => [axis, 0]));
      let gripper = 0;
      if (performance.now() < this.quiet) return {motion: AXES.map(() => 0), gripper, arm: this.arm};
      for (const {meaning, amount} of [...this.held.values(), ...this.padHeld]) {
        if (meaning === "open" || meaning === "close") gripper += meaning === "open" ? 1 : -1;
        else motion[meaning.slice(1)] += (meaning[0] === "+" ? 1 : -1) * amount;
      }
      const {move, lift} = this.sticks;
      motion.x += move[1];
      motion.y -= move[0];
      motion[this.tilt ? "pitch" : "z"] += (this.tilt ? -1 : 1) * lift[1];
      motion[this.tilt ? "roll" : "yaw"] += (this.tilt ? 1 : -1) * lift[0];
      const sign = (axis) => (this.faces && !"z yaw".includes(axis) ? -1 : 1); // half a turn about the vertical
      return {motion: AXES.map((axis) => sign(axis) * this.speed * clamp(motion[axis])), gripper: clamp(gripper), arm: this.arm};
    },

    press(event, more = {}) {
      document.activeElement?.blur(); // else the space bar would press it again
      const press = {event, number: ++this.number, episode: this.view.episode || 0, page: this.view.page, at: performance.now(), ...more};
      this.unsent.push(press);
      if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(press));
    },

    // After a pause, from the chosen moment: as the person, or as the policy.
    goOn(mine) {
      this.releaseAll();
      if (mine !== Boolean(this.view.driving)) this.press(mine ? "take" : "give");
      if (this.chosen < this.status.step) this.press("rewind", {step: this.chosen});
      else this.press("resume");
    },

    scrub(by) {
      this.moment = Math.max(this.view.moments, Math.min(this.status.step, this.chosen + by));
      this.sendState();
    },

    toggle() {
      this.releaseAll();
      this.press(this.view.driving ? "give" : "take");
    },

    act(meaning) {
      if (meaning === "toggle") this.toggle();
      else if (meaning === "arm") this.choose("arm", this.view.arms > 1 ? 1 - this.arm : 0);
      else if (meaning === "release_estop") { if (this.status.estop && this.mayMark) this.press(meaning); }
      else if (ALWAYS.includes(meaning) || (meaning === "reset" ? this.mayMark : this.mayJudge)) this.press(meaning);
    },

    choose(name, value) {
      document.activeElement?.blur();
      this.releaseAll();
      this[name] = value;
      this.quiet = performance.now() + SHORTEST; // so that a control step sees the new choice with nothing held
    },

    choosePadLegend(on) {
      document.activeElement?.blur();
      this.keysChosen = !on;
    },

    chooseFacing(on) {
      this.choose("facing", on);
      remember("localStorage", "hilt-facing", on);
    },

    moved(stick, to) {
      this.sticks[stick] = to;
      if (to.some(Boolean)) this.nudge();
      this.sendState();
    },

    hold(key, meaning) {
      if (this.view.driving) this.hint = ""; // it was let go, and pressed again
      this.nudge();
      this.held.set(key, {meaning, amount: 1, since: performance.now()});
      this.sendState();
    },

    letGo(key) {
      const held = this.held.get(key);
      if (held) held.until = held.since + SHORTEST;
      this.turnOver();
    },

    releaseAll() {
      this.held.clear();
      this.padHeld = [];
      this.rested.clear(); // what of the gamepad is held now must be let go before it counts
      this.$refs.move?.drop();
      this.$refs.lift?.drop();
      this.sendState();
    },

    keyDown(event) {
      if (event.ctrlKey || event.altKey || event.metaKey) return this.releaseAll();
      if (this.watch || document.querySelector("dialog[open]")) return; // what lies over the page gets the keys
      const name = keyName(event);
      const meaning = this.keys[name];
      if (this.view.pausing && /^arrow(left|right)$/.test(name)) {
        event.preventDefault();
        event.stopPropagation();
        return this.scrub((name === "arrowleft" ? -1 : 1) * (event.shiftKey ? 10 : 1));
      }
      if (name === "p" && this.status.rewind && this.mayMark && !event.repeat) return this.view.pausing ? this.goOn(Boolean(this.view.driving)) : this.press("pause");
      if (meaning === "arm" && !(this.view.arms > 1)) return; // Tab goes from button to button, and
      if (event.target.matches?.(":focus-visible") && /^(enter|arrow)/.test(name)) return; // what it has reached gets its own keys
      if (meaning) event.preventDefault();
      if (meaning) event.stopPropagation(); // they are no keys of the app around
      if (!meaning || event.repeat) return;
      if ("+-".includes(meaning[0]) || meaning === "open" || meaning === "close") this.hold(event.code, meaning);
      else this.act(meaning);
    },

    // The browser keeps a gamepad's last values while the page is not in front: they do not count then. Beyond this machine it may
    // show gamepads to https pages only. A pad without the standard layout may have a trigger, at -1, where a stick should be.
    readGamepad() {
      if (this.watch) return;
      const seen = document.hasFocus() && !document.hidden ? navigator.getGamepads?.() : null;
      const pads = [...(seen || [])].filter((pad) => pad?.connected);
      const pad = pads.find((pad) => pad.mapping === "standard");
      const name = (pad || pads[0])?.id.split("(")[0];
      this.gamepad = pad ? this.w("Gamepad: {name}", {name}) : pads.length ? this.w("{name}: its layout is not known here.", {name}) : navigator.getGamepads ? this.w("Gamepad: press a button.") : "";
      this.padHeld = [];
      this.pad = Boolean(pad);
      if (!pad) return this.rested.clear();
      const counted = (part, value) => {
        if (!value) this.rested.add(part);
        return this.rested.has(part) ? value : 0;
      };
      const axis = (index) => counted(`axis ${index}`, Math.abs(pad.axes[index] || 0) < 0.12 ? 0 : pad.axes[index]);
      const button = (index) => counted(`button ${index}`, pad.buttons[index]?.value || 0);
      for (const index in BUTTONS) if (button(index) && this.rested.delete(`button ${index}`)) this.act(BUTTONS[index]);
      this.padHeld = [
        {meaning: "-x", amount: axis(1)}, {meaning: "-y", amount: axis(0)}, {meaning: "-yaw", amount: axis(2)}, {meaning: "-z", amount: axis(3)},
        {meaning: "+pitch", amount: button(13) - button(12)}, {meaning: "+roll", amount: button(15) - button(14)},
        ...(button(6) > 0.5 ? [{meaning: "open"}] : []), ...(button(7) > 0.5 ? [{meaning: "close"}] : []),
      ];
      if (this.padHeld.some(({amount}) => amount !== 0)) this.nudge();
    },
  },
};

// By the place of a letter and not by what is printed there: the same hand on every layout.
function keyName(event) {
  return event.code.startsWith("Key") ? event.code.slice(3).toLowerCase() : event.key.toLowerCase();
}
