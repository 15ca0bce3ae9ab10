// As much of a document as the script of an inspected prompt uses. TOKENS, CELLS and PLACES are put
// in by a test.

class Element {
  constructor(name, more = {}) {
    const classes = new Set();
    this.classList = {
      add: (c) => classes.add(c),
      remove: (c) => classes.delete(c),
      toggle: (c, on) => (on ? classes.add(c) : classes.delete(c)),
    };
    Object.assign(this, { name, classes, dataset: {}, style: {}, on: {}, children: [] }, more);
  }
  addEventListener(name, does) {
    this.on[name] = does;
  }
  append(...children) {
    this.children.push(...children);
  }
  replaceChildren(...children) {
    this.children = children;
  }
  removeAttribute(name) {
    this[name] = "";
  }
  querySelectorAll() {
    return [];
  }
  getBoundingClientRect() {
    return { left: 0, right: 10, top: 60, bottom: 70 };
  }
  closest() {
    return this;
  }
}

const heldMade = CELLS.map(([layer, head, held]) => ({ dataset: { layer, head, held } }));
const cellsMade = CELLS.map(() => new Element("path"));
const tokensMade = TOKENS.map(([className, title]) => new Element("span", { className, title }));
const placesMade = PLACES.map((textContent) => new Element("span", { textContent }));
const heatMade = new Element("svg");
const byId = Object.fromEntries(
  ["choice", "kept", "prompt", "places", "shades"].map((id) => [id, new Element("div", { hidden: false })]),
);
byId.tip = new Element("div", { hidden: true, offsetWidth: 100, offsetHeight: 40 });
const bySelector = {
  "[data-held]": heldMade,
  '#kept [aria-roledescription="rect mark"]': cellsMade,
  "#prompt .t": tokensMade,
  "#places .place": placesMade,
  "svg.chart": [heatMade],
  "th[data-sort]": [],
};

globalThis.document = {
  on: {},
  documentElement: { clientWidth: 390 },
  querySelectorAll: (selector) => bySelector[selector],
  createElement: (name) => new Element(name, { value: "" }),
  getElementById: (id) => byId[id],
  addEventListener: (name, does) => (document.on[name] = does),
};

const made = {
  choose: (layer, head, place = "") => {
    const choices = byId.choice.children.slice(0, -1).map((label) => label.children[1]);
    [layer, head, place].forEach((value, i) => (choices[i].value = value));
    choices[0].on.change();
  },
  cell: (i) => cellsMade[i].on.click(),
  point: (i) => byId.prompt.on.pointermove({ target: tokensMade[i] }),
  state: () => {
    const labels = byId.choice.children.slice(0, -1);
    return {
      choices: labels.map((label) => [
        label.children[0],
        label.children[1].value,
        label.children[1].children.map((option) => option.textContent),
      ]),
      said: byId.choice.children.at(-1).textContent,
      looks: tokensMade.map((token) => token.className),
      facts: tokensMade.map((token) => token.dataset.told.split("\n")[1]),
      titles: tokensMade.map((token) => token.title),
      hidden: [byId.places.hidden, byId.shades.hidden],
      chosen: cellsMade.map((cell) => cell.classes.has("chosen")),
      tip: byId.tip.hidden ? null : [byId.tip.children[0].textContent, byId.tip.children[1]],
    };
  },
};
