// The edits that were made in this tab, on whichever page: Z undoes the last one. What was done with many episodes at once is one of them.

const TAB = "hilt-edits";
const KEPT = 500;

export const made = () => JSON.parse(sessionStorage.getItem(TAB) || "[]");
export const keepMade = (edits) => sessionStorage.setItem(TAB, JSON.stringify(edits.slice(-KEPT)));
export const post = async (address, body) => (await fetch(address, {method: "POST", body: JSON.stringify(body)})).json();

// Undoes one of them; the server answers with what it is about.
export const undoMade = (one, author) => one.several
  ? post("/episodes/many", {data: one.data, undo: one.several, author})
  : post("/episodes/edit", {...one, author, action: "undo"});
