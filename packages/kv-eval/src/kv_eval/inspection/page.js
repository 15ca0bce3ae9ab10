
// Choice of layer, head and place: the text shows their tokens, from the data of the map's cells.

const cells = document.querySelectorAll('#kept [aria-roledescription="rect mark"]');
const allHeads = [...document.querySelectorAll("[data-held]")].map((data, i) => ({
  cell: cells[i], // in the same order
  ...data.dataset,
}));
const placeNames = [...document.querySelectorAll("#places .place")].map((name) => name.textContent);
const promptBox = document.getElementById("prompt");
const tokens = [...document.querySelectorAll("#prompt .t")].map((shown) => {
  const [name, facts] = shown.title.split("\n");
  shown.removeAttribute("title"); // else the browser shows it too
  return { shown, looks: shown.className, name, facts };
});

function chooser(name, first, options) {
  const label = document.createElement("label");
  const select = document.createElement("select");
  for (const [value, words] of [["", first], ...options]) {
    const option = document.createElement("option");
    option.value = value;
    option.textContent = words;
    select.append(option);
  }
  label.append(name, select);
  select.addEventListener("change", show);
  document.getElementById("choice").append(label);
  return select;
}

const numbers = (key) => [...new Set(allHeads.map((each) => each[key]))].map((n) => [n, n]);
const layers = chooser("layer", "all", numbers("layer"));
const heads = chooser("head", "all", numbers("head"));
const kinds = placeNames.map((name, i) => [i.toString(36), name]);
const holds = kinds.length > 1 ? chooser("held as", "any", kinds) : { value: "" };
const said = document.createElement("output");
document.getElementById("choice").append(said);

const fits = (choice, value) => choice.value === "" || choice.value === value;
const counted = (at) => at !== "." && fits(holds, at);
const placeOf = (at) => (at === "." ? placeNames.length : parseInt(at, 36));

function shade(share) {
  if (share === 0 || share === 1) return 10 * share;
  return Math.min(9, Math.max(1, Math.floor(10 * share + 0.5)));
}

function looksOfOne(at) {
  const name = [...placeNames, "not kept"][placeOf(at)];
  return [counted(at) ? `at k${placeOf(at) % 6}` : "s0", name];
}

function looksOfSome(some, i) {
  const counts = [...placeNames, "not kept"].map((name) => [name, 0]);
  for (const { held } of some) counts[placeOf(held[i])][1] += 1;
  const any = some.length - counts.at(-1)[1];
  const kept = holds.value === "" ? any : counts[placeOf(holds.value)][1];
  const facts = counts
    .filter(([, count]) => count)
    .map(([name, count]) => `${name} ${((100 * count) / some.length).toFixed(1)}%`);
  return [`s${shade(kept / some.length)}`, facts.join(", ")];
}

function tally(some) {
  let kept = 0;
  for (const { held } of some) kept += [...held].filter(counted).length;
  const mean = (kept / some.length).toLocaleString("en", { maximumFractionDigits: 1 });
  const whole = tokens.length.toLocaleString("en");
  const how = holds.value === "" ? "kept" : `held as ${placeNames[placeOf(holds.value)]}`;
  return `${mean} of ${whole} tokens ${how}${some.length === 1 ? "" : ", on average"}`;
}

function show() {
  hide();
  const some = allHeads.filter(({ layer, head }) => fits(layers, layer) && fits(heads, head));
  const one = some.length === 1;
  const all = !one && some.length === allHeads.length;
  tokens.forEach(({ shown, looks, name, facts }, i) => {
    const marks = looks.split(" ").slice(2); // after `t` and the shade: classes of the kind of text
    let found = [looks.split(" ")[1], facts];
    if (one) found = looksOfOne(some[0].held[i]);
    else if (!all || holds.value !== "") found = looksOfSome(some, i);
    shown.className = ["t", found[0], ...marks].join(" ");
    shown.dataset.told = `${name}\n${found[1]}`;
  });
  document.getElementById("places").hidden = !one;
  document.getElementById("shades").hidden = one;
  for (const each of allHeads) {
    each.cell.classList.toggle("chosen", !all && some.includes(each));
  }
  said.textContent = tally(some);
}

for (const { cell, layer, head } of allHeads) {
  cell.addEventListener("click", () => {
    const again = layers.value === layer && heads.value === head;
    layers.value = again ? "" : layer;
    heads.value = again ? "" : head;
    show();
  });
}
document.getElementById("kept").classList.add("choosing");

telling(promptBox, (event) => event.target.closest(".t"));
show();
