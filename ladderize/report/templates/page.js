"use strict";

// ---- plots: drawn by Vega-Lite where they stand; colours are CSS variables, so dark mode needs no new drawing ----

const LOG_ERRORS = 1;  // an empty selection is no reason to warn

function drawPlot(figure) {
  const specs = JSON.parse(figure.querySelector(".specs").textContent);
  const views = [];
  figure.querySelectorAll(".chart").forEach((place) => {
    const spec = specs[Number(place.dataset.panel)];
    const drawn = vegaEmbed(place, spec, { renderer: "svg", actions: false, tooltip: false, mode: "vega-lite", logLevel: LOG_ERRORS });
    views.push(drawn.then((result) => named(result.view, place, spec.description)));
    if (figure.classList.contains("interactive")) {
      new MutationObserver(() => makeReachable(place)).observe(place, { childList: true, subtree: true });
      drawn.then(() => makeReachable(place));
    }
  });
  figure.querySelectorAll("select[data-parameter]").forEach((select) => {
    select.addEventListener("change", () => {
      views.forEach((pending) => pending.then((view) => view.signal(select.dataset.parameter, select.value).runAsync()));
    });
  });
  const ready = Promise.all(views);
  ready.then(() => figure.setAttribute("data-drawn", "true"));
  return ready;
}

function named(view, place, description) {
  // the drawing bears the name, not the box around it
  place.removeAttribute("role");
  place.removeAttribute("aria-roledescription");
  place.removeAttribute("aria-label");
  const drawing = place.querySelector("svg");
  drawing.setAttribute("role", "graphics-document");
  drawing.setAttribute("aria-label", description);
  return view;
}

function markOf(target) {
  const mark = target.closest ? target.closest("[role=graphics-symbol][aria-label]") : null;
  return mark && !mark.classList.contains("role-axis") ? mark : null;
}

function makeReachable(place) {
  place.querySelectorAll("[role=graphics-symbol][aria-label]").forEach((mark) => {
    if (markOf(mark) && !mark.hasAttribute("tabindex")) {
      mark.setAttribute("tabindex", "0");
    }
  });
}

function describeMarks(figure) {
  const status = figure.querySelector("[role=status]");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  figure.append(tip);
  const show = (event) => {
    const mark = markOf(event.target);
    if (!mark) {
      return;
    }
    tip.textContent = mark.getAttribute("aria-label");
    tip.hidden = false;
    const box = figure.getBoundingClientRect();
    const at = mark.getBoundingClientRect();
    tip.style.left = Math.max(0, Math.min(at.left - box.left, box.width - tip.offsetWidth)) + "px";
    tip.style.top = at.bottom - box.top + 8 + "px";
    if (status) {
      status.textContent = tip.textContent;
    }
  };
  const hide = () => { tip.hidden = true; };
  figure.addEventListener("mouseover", show);
  figure.addEventListener("focusin", show);
  figure.addEventListener("mouseout", hide);
  figure.addEventListener("focusout", hide);
  figure.addEventListener("keydown", (event) => { if (event.key === "Escape") { hide(); } });
}

// ---- tables: a button in a heading sorts by its column ----

function sortKey(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
}

function compareKeys(a, b) {
  if (typeof a === "number" && typeof b === "number") {
    return a - b;
  }
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortBy(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const way = heads[column].getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  heads.forEach((head, index) => head.setAttribute("aria-sort", index === column ? way : "none"));
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, key: sortKey(row, column) }));
  const known = rows.filter((entry) => entry.key !== "");
  known.sort((a, b) => compareKeys(a.key, b.key) * (way === "ascending" ? 1 : -1));
  const unknown = rows.filter((entry) => entry.key === "");  // last, whichever way
  table.tBodies[0].append(...[...known, ...unknown].map((entry) => entry.row));
}

document.querySelectorAll("table.sortable").forEach((table) => {
  table.querySelectorAll("thead button").forEach((button, column) => {
    button.addEventListener("click", () => sortBy(table, column));
  });
});

const figures = [...document.querySelectorAll("figure.plot")];
figures.forEach(describeMarks);
Promise.all(figures.map(drawPlot)).then(() => document.documentElement.setAttribute("data-ready", "true"));

// ---- print: the data of every plot is shown ----

window.addEventListener("beforeprint", () => {
  document.querySelectorAll("details:not([open])").forEach((details) => {
    details.open = true;
    details.dataset.opened = "for print";
  });
});
window.addEventListener("afterprint", () => {
  document.querySelectorAll("details[data-opened]").forEach((details) => {
    details.open = false;
    delete details.dataset.opened;
  });
});
