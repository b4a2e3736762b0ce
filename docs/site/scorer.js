// A title that has the words of the question counts most. Guides come before references; lists of messages, signatures
// and changes come last.
const questionWords = (new URLSearchParams(window.location.search).get("q") || "")
  .toLowerCase()
  .split(/[\s?!.,]+/)
  .filter((word) => word.length > 2);

var Scorer = {
  score: ([name, title, anchor, description, score]) => {
    const named = questionWords.filter((word) => title.toLowerCase().includes(word)).length;
    const all = score + (questionWords.length ? (20 * named) / questionWords.length : 0);
    if (/^reference\/errors\/./.test(name) || /^(changelog|architecture|tests|benchmarks)$/.test(name)) return all / 6;
    if (/^api\//.test(name)) return all / 5;
    return /^reference\//.test(name) ? all / 3 : all;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
