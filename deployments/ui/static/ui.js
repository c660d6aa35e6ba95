// What pages do beyond links and forms: curves, parts that are fetched again while a run goes on, texts to copy.
// Whatever comes from a run is set as text, never as HTML.
"use strict";

const COLORS = ["#2f6fb5", "#d9822b", "#2e9e6b", "#b0479a", "#7a6fd0"];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [14, 5]]; // so that runs differ by more than colour
const FIRST = 9; // curves that are shown at once

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A number of an axis in few letters.
function short(value) {
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e5) ? value.toExponential(1).replace(".0e", "e") : String(+value.toPrecision(4));
}

// The same curve of one or several runs as uPlot takes it: the union of their steps, then the values of each.
function columns(curves) {
  const steps = [...new Set(curves.flatMap((each) => each.x))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const values = lines(curves).map(({ curve, figures }) => {
    const row = new Array(steps.length).fill(undefined);
    curve.x.forEach((step, index) => { row[place.get(step)] = curve[figures][index]; });
    return row;
  });
  return [steps, ...values];
}

// What is drawn: each curve, and the ends of its interval where it has one.
function lines(curves) {
  return curves.flatMap((curve) => (curve.lower ? ["y", "upper", "lower"] : ["y"]).map((figures) => ({ curve, figures })));
}

// Curves over moments of several runs: the same moment stands at the same place in all of them. Curves over steps stay
// as they are.
function aligned(curves) {
  const number = (label) => Number(label.match(/^after iteration (\d+)$/)?.[1] ?? 0);
  const rank = (label) => ({ before: 0, "after SFT": 1 })[label] ?? (number(label) ? 2 : 3); // then what a run ends with
  const moments = [...new Set(curves.flatMap((curve) => curve.labels || []))];
  moments.sort((a, b) => rank(a) - rank(b) || number(a) - number(b));
  return curves.map((curve) => (curve.labels ? { ...curve, x: curve.labels.map((label) => moments.indexOf(label) + 1) } : curve));
}

// The places of an axis whose names, of so many pixels, do not overlap: the first one, and every so many.
function spaced(plot, first, last, pixels) {
  const step = Math.max(1, Math.ceil((pixels * (last - first)) / (plot.bbox.width / devicePixelRatio || 1)));
  const places = [];
  for (let place = 1; place <= last; place += step) if (place >= first) places.push(place);
  return places;
}

function draw(box, curves) {
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
  const drawn = lines(curves);
  const colored = (curve) => COLORS[curve.place % COLORS.length];
  const series = drawn.map(({ curve, figures }) => ({
    label: figures === "y" ? curve.run : figures, stroke: colored(curve), spanGaps: true,
    ...(figures === "y" ? { dash: DASHES[curve.place % DASHES.length], width: 2 } : { width: 0, points: { show: false } }),
    value: (plot, value) => (value == null ? "" : String(+value.toPrecision(5))),
  }));
  const bands = drawn.flatMap(({ curve, figures }, index) => (figures === "upper" ? [{ series: [index + 1, index + 2], fill: `${colored(curve)}2e` }] : []));
  const names = new Map(curves.flatMap((curve) => (curve.labels || []).map((label, index) => [curve.x[index], label])));
  const moments = names.size > 0; // and no steps
  const letters = Math.max(...[...names.values()].map((name) => name.length), 0) * 7; // pixels of the longest name
  const options = {
    width: box.clientWidth - 2, height: 200, scales: { x: { time: false } }, bands,
    axes: [moments ? { ...axis, splits: (plot, axis, first, last) => spaced(plot, first, last, letters), values: (plot, ticks) => ticks.map((tick) => names.get(tick) ?? "") } : axis,
      { ...axis, size: 62, values: (plot, ticks) => ticks.map(short) }],
    series: [moments ? { label: "moment", value: (plot, place) => names.get(place) ?? "" } : { label: "step" }, ...series],
    cursor: { drag: { x: true, y: false } },
    padding: [null, moments ? Math.max(16, letters / 2) : null, null, null], // of the last moment's name a half
  };
  return new uPlot(options, columns(curves), box);
}

function picture(name) {
  const box = document.createElement("section");
  box.className = "chart";
  const title = document.createElement("h3");
  title.append(Object.assign(document.createElement("span"), { textContent: name }));
  const save = Object.assign(document.createElement("button"), { type: "button", textContent: "PNG" });
  save.setAttribute("aria-label", `Save ${name} as PNG`);
  title.append(save);
  const place = document.createElement("div");
  box.append(title, place);
  let plot = null;
  box.show = (curves) => {
    if (!plot) { plot = draw(place, curves); return; }
    const steps = plot.data[0];
    const isWhole = plot.scales.x.min <= steps[0] && plot.scales.x.max >= steps[steps.length - 1];
    plot.setData(columns(curves), isWhole); // who looks closer goes on looking there
  };
  save.onclick = () => plot.ctx.canvas.toBlob((blob) => {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `${name.replace(/[^\w-]+/g, "-")}.png` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  return box;
}

function frame(place, names) {
  const boxes = new Map(names.map((name) => [name, picture(name)]));
  const wasOpen = place.querySelector("details.more")?.open;
  const first = names.slice(0, FIRST).map((name) => boxes.get(name));
  const rest = names.slice(FIRST).map((name) => boxes.get(name));
  place.replaceChildren(...first);
  if (!names.length) {
    place.append(Object.assign(document.createElement("p"), { className: "empty", textContent: "No step is done yet, or this run trains nothing." }));
  }
  const more = Object.assign(document.createElement("details"), { className: "more" });
  if (rest.length) {
    more.append(Object.assign(document.createElement("summary"), { textContent: `${rest.length} more` }));
    const grid = Object.assign(document.createElement("div"), { className: "charts" });
    grid.append(...rest);
    more.append(grid);
    more.open = Boolean(wasOpen);
    more.addEventListener("toggle", () => place.showAll());
    place.append(more);
  }
  place.names = names.join("\n");
  place.showAll = () => names.forEach((name, index) => {
    if (index < FIRST || more.open) boxes.get(name).show(place.curves.get(name));
  });
}

async function curvesInto(place) {
  const addresses = place.dataset.curves.trim().split(/\s+/);
  const answers = await Promise.all(addresses.map(async (address) => {
    const answer = await fetch(address);
    if (!answer.ok) throw new Error(`${address} answered ${answer.status}`);
    return answer.json();
  }));
  const names = [...new Set(answers.flatMap((each) => each.curves.map((curve) => curve.name)))];
  place.curves = new Map(names.map((name) => [name, aligned(answers.flatMap((each, index) =>
    each.curves.filter((curve) => curve.name === name).map((curve) => ({ ...curve, run: each.run, place: index }))))]));
  if (place.names !== names.join("\n")) frame(place, names);
  place.showAll();
}

function showCurves(place) {
  const attempt = () => curvesInto(place).catch((error) => {
    if (place.names === undefined) place.replaceChildren(Object.assign(document.createElement("p"), { className: "empty", textContent: `The curves could not be read: ${error.message}` }));
  });
  attempt();
  const timer = place.dataset.every && setInterval(() => {
    if (!document.hidden) attempt();
    if (!document.querySelector("#facts[data-refresh]")) clearInterval(timer); // the run has ended
  }, 1000 * place.dataset.every);
}

// A part of the page, by its id, from a fresh copy of the page; what is chosen in it stays chosen.
async function refresh(part) {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById(part.id);
  if (!fresh) return;
  const chosen = new Set([...part.querySelectorAll("input:checked")].map((input) => input.value));
  if (part.contains(document.activeElement) && document.activeElement.matches("input, a")) return; // somebody is in it
  part.replaceChildren(...fresh.childNodes);
  part.querySelectorAll("input[type=checkbox]").forEach((input) => { input.checked = chosen.has(input.value); });
  if (!fresh.dataset.refresh) { delete part.dataset.refresh; }
}

document.querySelectorAll("[data-curves]").forEach(showCurves);
document.querySelectorAll(".graph").forEach((place) => {
  const asked = place.querySelector(".asked");
  if (!asked) return;
  const [box, frame] = [asked.getBoundingClientRect(), place.getBoundingClientRect()];
  place.scrollLeft += box.left + box.width / 2 - frame.left - frame.width / 2;
  place.scrollTop += box.top + box.height / 2 - frame.top - frame.height / 2;
});
document.querySelectorAll("[data-refresh]").forEach((part) => {
  const timer = setInterval(() => {
    if (!part.dataset.refresh) clearInterval(timer);
    else if (!document.hidden) refresh(part).catch(() => {}); // the server is away; it is asked again
  }, 1000 * part.dataset.refresh);
});
document.querySelectorAll("details[data-load]").forEach((part) => {
  part.addEventListener("toggle", async () => {
    if (!part.open || part.dataset.loaded) return;
    part.dataset.loaded = "yes";
    const place = part.querySelector("div");
    const answer = await fetch(part.dataset.load);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    place.replaceChildren(...fresh.body.childNodes);
  });
});
document.addEventListener("click", (event) => {
  const text = event.target.closest("code.copy");
  if (!text || !navigator.clipboard) return;
  navigator.clipboard.writeText(text.textContent).then(() => {
    text.classList.add("copied");
    setTimeout(() => text.classList.remove("copied"), 1500);
  });
});
