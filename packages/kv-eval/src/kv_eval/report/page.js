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

// Tooltips of what a chart shows: when a pointer is near, on tap, and on focus.

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

function tell(mark, words = mark.getAttribute("aria-label")) {
  if (told === mark) return;
  hide();
  told = mark;
  mark.classList.add("told");
  const [first, ...facts] = words.split("\n");
  const name = document.createElement("strong");
  name.textContent = first;
  tip.replaceChildren(name, facts.join("\n"));
  tip.hidden = false;
  place();
}

function nearest(points, x, y) {
  let [best, least] = [null, 24]; // pixels
  for (const point of points) {
    const box = point.getBoundingClientRect();
    const away = Math.hypot((box.left + box.right) / 2 - x, (box.top + box.bottom) / 2 - y);
    if (away < least) [best, least] = [point, away];
  }
  return best;
}

// Tell of what `find` returns for an event of a pointer in a box.
function telling(box, find) {
  const point = (event) => {
    const found = find(event);
    if (found) tell(found, found.dataset.told);
    else hide();
  };
  box.addEventListener("pointermove", point);
  box.addEventListener("pointerdown", (event) => {
    event.stopPropagation(); // else the document hides it again
    point(event);
  });
  box.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") hide(); // touch: lifting a finger is a leave event
  });
}

for (const chart of document.querySelectorAll("svg.chart")) {
  const points = [...chart.querySelectorAll('[aria-roledescription="point"]')];
  telling(chart, (event) =>
    points.length
      ? nearest(points, event.clientX, event.clientY)
      : event.target.closest(".role-mark [aria-label]"),
  );
  for (const point of points) {
    point.setAttribute("tabindex", "0");
    point.addEventListener("focus", () => tell(point));
    point.addEventListener("blur", () => told === point && hide());
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
