// What the tests ask of a page. Selenium puts this in front of each script.

/** Resolves when all fonts are there and the page's size stayed the same for three frames. */
async function settled() {
  await document.fonts.ready;
  let before = "";
  for (let same = 0; same < 3; ) {
    await new Promise((done) => setTimeout(done, 50));
    const now = `${document.documentElement.scrollHeight} ${document.querySelectorAll("*").length}`;
    same = now === before ? same + 1 : 0;
    before = now;
  }
}

function described(element) {
  const id = element.id ? `#${element.id}` : "";
  const name = (element.getAttribute("aria-label") || element.textContent || "").trim().replace(/\s+/g, " ");
  return `${element.tagName.toLowerCase()}${id}${name ? ` ${name.slice(0, 60)}` : ""}`;
}

/** [red, green, blue, alpha] of any colour that CSS can say, as the browser paints it: 0 to 255, alpha 0 to 1. */
const painted = new Map();
function channels(colour) {
  if (!painted.has(colour)) {
    const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
    const pen = canvas.getContext("2d", { willReadFrequently: true });
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    painted.set(colour, [r, g, b, a / 255]);
  }
  return painted.get(colour);
}

function over(front, back) {
  const alpha = front[3];
  return [0, 1, 2].map((i) => front[i] * alpha + back[i] * (1 - alpha)).concat(1);
}

/** Relative luminance: WCAG 2.2, of sRGB. */
function luminance(colour) {
  const [r, g, b] = colour.slice(0, 3).map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

function withOpacity(colour, opacity) {
  return [...colour.slice(0, 3), colour[3] * opacity];
}

/** The colour that an HTML element stands on: its own background over its ancestors', over the page's. */
function behind(element) {
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.unshift(channels(getComputedStyle(at).backgroundColor));
  const scheme = matchMedia("(prefers-color-scheme: dark)").matches && declaresDark() ? [18, 18, 18, 1] : [255, 255, 255, 1];
  return layers.reduce((back, front) => over(front, back), scheme);
}

/** Whether the page lets the browser paint its canvas dark (the property color-scheme). */
function declaresDark() {
  return getComputedStyle(document.documentElement).colorScheme.includes("dark");
}

/** The same of a text in a drawing: filled shapes of the drawing that are painted before it and lie under its middle. */
function behindDrawn(text) {
  const svg = text.ownerSVGElement;
  const box = text.getBoundingClientRect();
  let back = behind(svg);
  for (const shape of svg.querySelectorAll("rect, path, circle")) {
    if (!(shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING)) continue;
    const style = getComputedStyle(shape);
    const matrix = shape.getScreenCTM();
    if (style.fill === "none" || style.visibility === "hidden" || !matrix || shape.closest("defs, clipPath")) continue;
    const middle = new DOMPoint(box.x + box.width / 2, box.y + box.height / 2).matrixTransform(matrix.inverse());
    if (!shape.isPointInFill(middle)) continue;
    const opacity = Number(style.fillOpacity) * Number(style.opacity);
    back = over(withOpacity(channels(style.fill), opacity), back);
  }
  return back;
}

function isShown(element) {
  const box = element.getBoundingClientRect();
  return box.width > 1 && box.height > 1 && element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
}

function opacityOf(element) {
  let opacity = 1;
  for (let at = element; at; at = at.parentElement) opacity *= Number(getComputedStyle(at).opacity);
  return opacity;
}

/** Texts whose contrast is below WCAG's level AA: 4.5, and 3 for large ones (24 px, or 18.66 px bold). */
function faintTexts() {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    const words = node.data.trim();
    if (!words || !element || element.closest("script, style, noscript, title, desc") || !isShown(element)) continue;
    const style = getComputedStyle(element);
    const drawn = element.ownerSVGElement;
    const back = drawn ? behindDrawn(element) : behind(element);
    const paint = drawn ? withOpacity(channels(style.fill), Number(style.fillOpacity)) : channels(style.color);
    const ratio = contrast(over(withOpacity(paint, opacityOf(element)), back), back);
    const size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    if (ratio < needed) {
      const named = (colour) => `rgb(${colour.slice(0, 3).map(Math.round)})`;
      found.push({ text: words.slice(0, 60), element: described(element).slice(0, 80), colour: named(paint),
        behind: named(back), ratio: Math.round(ratio * 100) / 100, needed });
    }
  }
  return found;
}

/** The shapes that a plot draws its data with; axes, grids, labels and backgrounds are none. */
function marksOf(figure) {
  const shapes = [...figure.querySelectorAll("svg [class*='mark-'] path, svg [class*='mark-'] rect, svg [class*='mark-'] line, svg .mark")];
  return shapes.filter((shape) => {
    const scenery = shape.closest("[class*='role-axis'], [class*='role-legend'], [class*='role-title'], .background, [class*='role-frame'] > g > path.background");
    const box = shape.getBoundingClientRect();
    return !scenery && !shape.matches(".background, .foreground") && (box.width > 0 || box.height > 0);
  });
}

/** Marks whose fill and stroke both have less than 3:1 with what is behind the drawing. */
function faintMarks() {
  const found = [];
  for (const figure of document.querySelectorAll("figure")) {
    for (const shape of marksOf(figure)) {
      const style = getComputedStyle(shape);
      const back = behind(shape.ownerSVGElement);
      const paints = [["fill", style.fillOpacity], ["stroke", style.strokeOpacity]]
        .filter(([name]) => style[name] !== "none" && (name === "fill" || parseFloat(style.strokeWidth) > 0))
        .map(([name, opacity]) => withOpacity(channels(style[name]), Number(opacity) * opacityOf(shape)));
      const best = Math.max(0, ...paints.map((paint) => contrast(over(paint, back), back)));
      if (best < 3) found.push(`${figure.id}: ${described(shape)}: ${Math.round(best * 100) / 100}`);
    }
  }
  return found;
}
