"use strict";

// Sorting: the heading of every column becomes a button.

function before(a, b, numbers) {
  if (a === "" || b === "") return (a === "") - (b === ""); // missing values sort last
  return numbers ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
}

function sortBy(head) {
  const row = head.parentElement;
  const body = row.closest("table").tBodies[0];
  const at = [...row.cells].indexOf(head);
  const falling = head.getAttribute("aria-sort") === "ascending";
  const numbers = head.dataset.sort === "number";
  const sorted = [...body.rows].sort((one, other) => {
    const [a, b] = [one.cells[at].dataset.value, other.cells[at].dataset.value];
    return falling && a !== "" && b !== "" ? before(b, a, numbers) : before(a, b, numbers);
  });
  for (const other of row.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", falling ? "descending" : "ascending");
  body.append(...sorted);
}

for (const head of document.querySelectorAll("th[data-sort]")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = head.textContent;
  button.addEventListener("click", () => sortBy(head));
  head.replaceChildren(button);
  head.setAttribute("aria-sort", "none");
}

// Tooltips of points: when a pointer is near, on tap, and on focus.

const tip = document.getElementById("tip");
let told = null;

function hide() {
  tip.hidden = true;
  if (told) told.classList.remove("told");
  told = null;
}

function place() {
  const box = told.getBoundingClientRect();
  const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
  const [middle, room] = [(box.left + box.right) / 2, document.documentElement.clientWidth];
  const left = Math.max(8, Math.min(middle - wide / 2, room - wide - 8));
  const top = box.top - high - 8 >= 0 ? box.top - high - 8 : box.bottom + 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

function tell(mark) {
  if (told === mark) return;
  hide();
  told = mark;
  mark.classList.add("told");
  const name = document.createElement("strong");
  name.textContent = mark.dataset.name;
  tip.replaceChildren(name, mark.dataset.facts);
  tip.hidden = false;
  place();
}

function nearest(marks, x, y) {
  let [best, least] = [null, 24]; // pixels
  for (const mark of marks) {
    const box = mark.getBoundingClientRect();
    const away = Math.hypot((box.left + box.right) / 2 - x, (box.top + box.bottom) / 2 - y);
    if (away < least) [best, least] = [mark, away];
  }
  return best;
}

for (const picture of document.querySelectorAll("svg.chart, svg.heat")) {
  const marks = [...picture.querySelectorAll(".mark")];
  for (const mark of picture.querySelectorAll("[data-name]")) {
    mark.querySelector("title").remove(); // else the browser shows it too
  }
  const point = (event) => {
    const found = marks.length
      ? nearest(marks, event.clientX, event.clientY)
      : event.target.closest("[data-name]");
    if (found) tell(found);
    else hide();
  };
  picture.addEventListener("pointermove", point);
  picture.addEventListener("pointerdown", (event) => {
    event.stopPropagation(); // else the document hides it again
    point(event);
  });
  picture.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") hide(); // touch: lifting a finger is a leave event
  });
  for (const mark of marks) {
    mark.addEventListener("focus", () => tell(mark));
    mark.addEventListener("blur", () => told === mark && hide());
  }
}

document.addEventListener("pointerdown", hide);
const scrolled = () => {
  if (told && told === document.activeElement) place(); // focus by Tab may have scrolled
  else hide();
};
document.addEventListener("scroll", scrolled, { capture: true, passive: true });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hide();
});
