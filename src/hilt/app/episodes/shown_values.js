// Values as the list and the page of an episode show them.

// A whole number, with its thousands separated; `toLocaleString` makes a new format for each.
const format = new Intl.NumberFormat();
export const whole = (value) => format.format(value);

// A number for a glance: whole ones in full, others with four digits.
export const brief = (value) => (Number.isInteger(value) ? whole(value) : `${+value.toPrecision(4)}`);

// One version of the policy. The numbers of a run go up by `per` with each start of its learner, and count from there.
const version = (number, per, started) => {
  const start = per ? Math.floor(number / per) : 0;
  return `v${whole(per ? number % per : number)}` + (start > 1 ? " " + started(start) : "");
};

// The versions of the policy that acted in an episode: `v1,250`, or `v1,200-1,250`; `started` writes the number of a start.
export const versions = (row, started) => {
  const {version: last, first_version: first, versions_per_start: per} = row;
  if (last === null) return "";
  if (first === null || first === last) return version(last, per, started);
  const sameStart = !per || Math.floor(first / per) === Math.floor(last / per);
  if (!sameStart) return `${version(first, per, started)} - ${version(last, per, started)}`;
  return version(first, per, () => "").trim() + "-" + version(last, per, started).slice(1);
};
