// Elements as values, and bringing the page to them. A view says what should be there; what is there already stays, with
// its focus, its selection and its scroll position. Text becomes text nodes: nothing that comes from elsewhere is ever
// read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `h("a", {href}, "text", …)`; `svg:path` for SVG. `key` keeps it the same among its siblings. */
export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, key: props?.key, children: flat(children) };
}

function flat(children) {
  return children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false && one !== "");
}

/** Make the children of `parent` these. */
export function render(parent, ...nodes) {
  reconcile(parent, flat(nodes));
}

function reconcile(parent, wanted) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (child.owKey !== undefined) keyed.set(child.owKey, child);
  let at = parent.firstChild;
  for (const node of wanted) {
    const found = match(node, at, keyed);
    if (found === null) {
      parent.insertBefore(create(node), at);
      continue;
    }
    if (found === at) at = at.nextSibling;
    else parent.insertBefore(found, at);
    update(found, node);
  }
  while (at !== null) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function match(node, at, keyed) {
  if (typeof node !== "object") return at?.nodeType === Node.TEXT_NODE ? at : null;
  if (node.key !== undefined) {
    const found = keyed.get(node.key);
    keyed.delete(node.key);
    return found?.owTag === node.tag ? found : null;
  }
  return at?.owTag === node.tag && at.owKey === undefined ? at : null;
}

function create(node) {
  if (typeof node !== "object") return document.createTextNode(String(node));
  const made = node.tag.startsWith("svg:")
    ? document.createElementNS(SVG, node.tag.slice(4))
    : document.createElement(node.tag);
  made.owTag = node.tag;
  made.owKey = node.key;
  made.owProps = {};
  update(made, node);
  node.props.made?.(made);
  return made;
}

function update(element, node) {
  if (typeof node !== "object") {
    if (element.data !== String(node)) element.data = String(node);
    return;
  }
  const before = element.owProps;
  for (const name of Object.keys(before)) if (!(name in node.props)) set(element, name, undefined);
  for (const [name, value] of Object.entries(node.props)) if (before[name] !== value) set(element, name, value);
  element.owProps = node.props;
  if (node.props.initial === undefined) reconcile(element, node.children);
}

function set(element, name, value) {
  if (name === "key" || name === "made") return;
  if (name === "initial") {
    if (element.owProps.initial === undefined) element.value = value;
  } else if (name.startsWith("on")) element[name] = value ?? null;
  else if (name === "style") restyle(element, value ?? {});
  else if (name === "disabled" || name === "hidden" || name === "checked") element[name] = Boolean(value);
  else if (value === undefined || value === null || value === false) element.removeAttribute(name);
  else element.setAttribute(name, value === true ? "" : String(value));
}

/** Through the style object, which the page's policy allows; a style attribute it would not. */
function restyle(element, wanted) {
  for (const name of [...element.style]) if (!(name in wanted)) element.style.removeProperty(name);
  for (const [name, value] of Object.entries(wanted)) element.style.setProperty(name, value);
}
