// The keys of the page of an episode, as in a video editor. The method is one of the component in episode_view.js.

export const keys = {
  key(event) {
    if (event.target.closest("input:not([type=checkbox]), select, textarea, dialog[open]") || event.ctrlKey || event.metaKey || event.altKey) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key, far = event.shiftKey ? 10 : 1;
    const first = this.episodes[0];
    if (this.asking) {
      if (key === "Enter" || key === "Escape") { event.preventDefault(); this.answer(key === "Enter" && !event.target.closest(".asking button:not(:first-of-type)")); }
      return;
    }
    if (key === " ") this.toggle();
    else if (key === "k") this.play(0);
    else if (key === "l") this.play(this.playing > 0 ? Math.min(8, this.playing * 2) : 1);
    else if (key === "j") this.play(this.playing < 0 ? Math.max(-8, this.playing * 2) : -1);
    else if (key === "ArrowLeft" || key === ",") { this.playing = 0; this.seek(this.step - far); }
    else if (key === "ArrowRight" || key === ".") { this.playing = 0; this.seek(this.step + far); }
    else if (key === "Home") this.seek(0);
    else if (key === "End") this.seek(this.last);
    else if (key === "i") this.from();
    else if (key === "o") this.upTo();
    else if (this.editing && "sfu".includes(key)) this.edit({action: {s: "success", f: "failure", u: "unknown"}[key]});
    else if (this.editing && key === "b") this.toggleBad();
    else if (this.editing && key === "m" && this.markName.trim()) this.mark();
    else if (this.editing && key === "n") this.unmark();
    else if (this.editing && key === "x" && this.cuts) this.split();
    else if (this.editing && key === "a" && this.joinable) this.join();
    else if (this.editing && key === "t") this.$refs.tag.focus();
    else if (this.editing && key === "r" && this.hasRewards) this.$refs.reward.focus();
    else if (this.editing && key === "e") this.$refs.instruction.select();
    else if (this.editing && key === "c" && this.ranged) this.trim();
    else if (!this.readonly && key === "z") this.undo();
    else if (key === "ArrowUp" && first?.neighbors.previous) location.href = this.href(first.neighbors.previous);
    else if (key === "ArrowDown" && first?.neighbors.next) location.href = this.href(first.neighbors.next);
    else return;
    event.preventDefault();
  },
};
