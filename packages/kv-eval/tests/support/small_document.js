// As much of a document as the page's script uses. KINDS, ROWS and MARKS are put in by a test.

class Element {
  constructor(name, more = {}) {
    const classes = new Set();
    this.classList = { add: (c) => classes.add(c), remove: (c) => classes.delete(c) };
    Object.assign(this, { name, classes, attributes: {}, dataset: {}, style: {}, on: {} }, more);
  }
  setAttribute(key, value) {
    this.attributes[key] = value;
  }
  getAttribute(key) {
    return this.attributes[key] ?? null;
  }
  addEventListener(name, does) {
    this.on[name] = does;
  }
  replaceChildren(...children) {
    this.children = children;
  }
  getBoundingClientRect() {
    const [x, y] = this.middle;
    return { left: x - 5, right: x + 5, top: y - 5, bottom: y + 5 };
  }
}

const bodyOfTable = { rows: [], append: (...rows) => (bodyOfTable.rows = rows) };
bodyOfTable.rows = ROWS.map((row) => ({ cells: row.map((value) => ({ dataset: { value } })) }));
const headRow = { closest: () => ({ tBodies: [bodyOfTable] }) };
headRow.cells = KINDS.map(
  (kind) => new Element("th", { dataset: { sort: kind }, textContent: kind, parentElement: headRow }),
);

const marksMade = MARKS.map(([name, x, y]) => {
  const attributes = { "aria-label": `${name}\n1\n2` };
  return new Element("path", { middle: [x, y], attributes });
});
const pictureMade = new Element("svg", { querySelectorAll: () => marksMade });
const tipMade = new Element("div", { hidden: true, offsetWidth: 100, offsetHeight: 40 });

globalThis.document = {
  on: {},
  documentElement: { clientWidth: 390 },
  querySelectorAll: (selector) => (selector.startsWith("th") ? headRow.cells : [pictureMade]),
  createElement: (name) => new Element(name),
  getElementById: () => tipMade,
  addEventListener: (name, does) => (document.on[name] = does),
};

const nameOf = (mark) => mark.attributes["aria-label"].split("\n")[0];
const made = {
  click: (i) => headRow.cells[i].children[0].on.click(),
  point: (name, x, y, pointerType = "mouse") =>
    pictureMade.on[name]({ clientX: x, clientY: y, pointerType, stopPropagation() {} }),
  mark: (i, name) => marksMade[i].on[name](),
  key: (key) => document.on.keydown({ key }),
  elsewhere: () => document.on.pointerdown({}),
  table: () => ({
    heads: headRow.cells.map((head) => head.attributes["aria-sort"]),
    buttons: headRow.cells.map((head) => `${head.children[0].name} ${head.children[0].type}`),
    rows: bodyOfTable.rows.map((row) => row.cells.map((cell) => cell.dataset.value)),
  }),
  tip: () =>
    tipMade.hidden
      ? null
      : {
          said: [tipMade.children[0].textContent, tipMade.children[1]],
          at: [tipMade.style.left, tipMade.style.top],
          marked: marksMade.filter((m) => m.classes.has("told")).map(nameOf),
        },
};
