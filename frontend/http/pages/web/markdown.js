// Markdown of a model as elements. A model's text is data: none of it becomes markup, script or a request by itself.
//
// Raw HTML is shown as the text that it is. What Markdown makes is then checked against the list of elements below, and
// the policy of the page (frontend/http/pages/page.py) forbids scripts, styles and images from elsewhere.

import DOMPurify from "./purify.es.mjs";
import {Marked} from "./marked.esm.js";

const MAX_CHARACTERS = 400_000; // of one message; a longer one is shown as plain text
const TAGS = "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul";
const ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"};
const escape = text => text.replace(/[&<>"']/g, one => ESCAPES[one]);

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({text}) => escape(text),
    // An image would be fetched from a place that the model chose: it becomes a link.
    image: ({href, text}) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({checked}) => (checked ? "\u2611 " : "\u2610 "),
  },
});

/** Return a DocumentFragment of a text in Markdown. */
export function render(text) {
  if (text.length > MAX_CHARACTERS) return plain(text);
  const found = DOMPurify.sanitize(marked.parse(text), {
    ALLOWED_TAGS: TAGS.split(" "),
    ALLOWED_ATTR: ["href", "class", "start", "align"],
    ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const link of found.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    if (link.href) link.title = link.href;
  }
  for (const code of found.querySelectorAll("pre > code")) addHead(code);
  for (const table of found.querySelectorAll("table")) {
    const box = document.createElement("div");
    box.className = "wide";
    table.replaceWith(box);
    box.append(table);
  }
  return found;
}

/** Return a DocumentFragment of a text as it is. */
export function plain(text) {
  const found = document.createDocumentFragment(), box = document.createElement("div");
  box.className = "plain_text";
  box.textContent = text;
  found.append(box);
  return found;
}

/** Put the name of the language and a button that copies over a block of code. */
function addHead(code) {
  const head = document.createElement("div"), name = document.createElement("span"), copy = document.createElement("button");
  name.textContent = (/^language-([\w+#.-]{1,30})/.exec(code.className) || ["", "text"])[1];
  copy.type = "button";
  copy.textContent = "Copy";
  copy.className = "plain copy_code";
  copy.setAttribute("aria-label", "copy this code");
  head.className = "code_head";
  head.append(name, copy);
  code.removeAttribute("class");
  code.parentElement.tabIndex = 0; // a wide block scrolls with the keyboard
  const box = document.createElement("div");
  box.className = "code";
  code.parentElement.replaceWith(box);
  box.append(head, code.parentElement);
}
