// The pictures of an episode: what the browser fetches, keeps and shows of each camera.

const KEPT = 160; // frames of one camera that the browser keeps
const AHEAD = 10; // frames that are fetched before they are shown
const IN_FLIGHT = 2; // requests of one camera for what is to be seen now, while the cursor moves
const AHEAD_IN_FLIGHT = 3; // requests of all cameras for frames that are not to be seen yet
const REST_MS = 150; // after a jump, until frames ahead are fetched: the next jump would wait for them, and they are of no use to it
const NEAR = 15; // a frame at most this many steps away stands for one that is still on its way

// The frames of one camera. The newest wish wins: frames that nobody waits for any more are not asked for. Frames ahead are
// asked for only while nothing else is, and the server makes them one after the other, so that they delay no wish by much.
export class Camera {
  static ahead = 0; // requests for frames that are not to be seen yet, of all cameras
  constructor(address, steps) {
    [this.address, this.steps] = [address, steps];
    [this.images, this.loading, this.wanted, this.shown, this.drawn] = [new Map(), new Map(), -1, -1, -1];
    [this.error, this.__v_skip] = ["", true]; // Vue does not watch it
  }
  show(step, direction) {
    if (this.wanted >= 0 && Math.abs(step - this.wanted) > AHEAD) this.rest();
    [this.wanted, this.direction, this.refused] = [Math.min(step, this.steps), direction, new Set()];
    const image = this.images.get(this.wanted);
    if (image) this.draw(this.wanted, image);
    else this.approach();
    this.fetch();
  }
  // Shows the nearest frame that is there, until the right one comes.
  approach() {
    const distance = (step) => Math.abs(step - this.wanted);
    let best = -1;
    for (const [step, image] of this.images) if (image && distance(step) <= NEAR && (best < 0 || distance(step) < distance(best))) best = step;
    if (best >= 0 && distance(best) < distance(this.drawn)) this.draw(best, this.images.get(best));
  }
  fetch() {
    const now = [...this.loading.values()].filter((ahead) => !ahead).length;
    if (!this.images.has(this.wanted) && !this.loading.has(this.wanted)) {
      if (now < IN_FLIGHT) this.load(this.wanted, false);
      return;
    }
    if (now || this.resting) return;
    for (let i = 1; i <= AHEAD && Camera.ahead < AHEAD_IN_FLIGHT; i++) {
      const step = this.wanted + i * this.direction;
      const there = this.images.has(step) || this.loading.has(step) || this.refused.has(step);
      if (step >= 0 && step <= this.steps && !there) this.load(step, true);
    }
  }
  rest() {
    clearTimeout(this.resting);
    this.resting = setTimeout(() => { this.resting = 0; this.fetch(); }, REST_MS);
  }
  load(step, ahead) {
    this.loading.set(step, ahead);
    if (ahead) Camera.ahead++;
    const image = new Image();
    const done = () => { this.loading.delete(step); if (ahead) Camera.ahead--; this.fetch(); };
    image.onload = () => {
      this.error = "";
      this.images.set(step, image);
      if (this.images.size > KEPT) this.images.delete(this.images.keys().next().value);
      if (step === this.wanted) this.draw(step, image);
      else if (this.shown !== this.wanted) this.approach();
      done();
    };
    image.onerror = () => {
      if (ahead) this.refused.add(step); // until the cursor moves: it may have been too far away by then
      else this.images.set(step, null);
      if (!ahead && step === this.wanted) this.error = "×";
      done();
    };
    image.src = this.address + step + (ahead ? "&ahead=1" : "");
  }
  draw(step, image) {
    if (!this.canvas || !image) return;
    if (this.canvas.width !== image.naturalWidth) [this.canvas.width, this.canvas.height] = [image.naturalWidth, image.naturalHeight];
    this.canvas.getContext("2d").drawImage(image, 0, 0);
    this.drawn = step;
    this.shown = step === this.wanted ? step : -1;
  }
}
