// What is around the conversation: the models, the list of conversations, the settings and the engine's figures.

import * as chats from "./chats.js";
import {$, make} from "./elements.js";
import * as server from "./server.js";

const PARAMETERS = ["max_tokens", "temperature", "top_p", "seed"];
const LOOK_MS = 1000, LOOK_HIDDEN_MS = 5000, MODELS_MS = 3000;

let found = []; // models, as the server lists them
let wanted = ""; // the model that was chosen, also while it is not listed
let actions = {}; // of page.js: open(id), rename(id, title), remove(id)
let last = null; // [time, tokens] of the figures before
let opened = ""; // the conversation whose choices are shown

export const key = () => $("key").value.trim();
export const model = () => $("model").value || wanted;
export const tell = text => { $("state").textContent = text; };
export const takesImages = () => !!cardOf(model())?.capabilities?.includes("vision");
const cardOf = id => found.find(one => one.id === id);
const hasMany = () => found.some(one => one.state);

/** The request's parameters that were given. */
export function parameters() {
  const given = PARAMETERS.filter(name => $(name).value !== "");
  return Object.fromEntries(given.map(name => [name, Number($(name).value)]));
}

/** What is shown until the first token arrives. */
export function waitingText() {
  const state = cardOf(model())?.state;
  return state && state !== "loaded" ? `Loading ${model()}\u2026` : "\u2026";
}

// --- models ---

export function choose(id) {
  wanted = id;
  showModels();
}

async function lookForModels() {
  try {
    found = await server.models(key());
    if ($("state").dataset.kind === "models") tell("");
    delete $("state").dataset.kind;
    showModels();
    setTimeout(lookForModels, hasMany() && !document.hidden ? MODELS_MS : 10 * MODELS_MS);
  } catch (error) {
    tell(error.message);
    $("state").dataset.kind = "models";
    if (error.status === 401) askKey();
    else setTimeout(lookForModels, MODELS_MS);
  }
}

function showModels() {
  const able = found.filter(one => !one.capabilities || one.capabilities.includes("completion"));
  const before = wanted || model();
  const options = able.map(one => make("option", {value: one.id, textContent: labelOf(one), disabled: one.state === "unavailable"}));
  const now = JSON.stringify(options.map(one => [one.textContent, one.value]));
  if ($("model").dataset.shown !== now) {
    $("model").replaceChildren(...options);
    $("model").dataset.shown = now;
  }
  const usable = able.filter(one => one.state !== "unavailable");
  $("model").value = usable.some(one => one.id === before) ? before : usable[0]?.id || "";
  $("attach").hidden = !takesImages();
  if (found.length && !able.length) tell("no model here answers chats");
}

function labelOf(card) {
  const size = card.num_bytes ? `, ${(card.num_bytes / 1e9).toFixed(1)} GB` : "";
  const state = card.state && card.state !== "loaded" ? ` (${card.state === "unloaded" ? "not loaded" : card.state}${size})` : "";
  return (card.parent ? `${card.parent} + adapter ${card.id}` : card.id) + state;
}

// --- conversations ---

export function showChats(current) {
  const kept = chats.list();
  $("chat_list").replaceChildren(...kept.map(one => rowOf(one, one.id === current, current)));
  $("export_all").hidden = !kept.length;
}

function rowOf(one, is_current, current) {
  const button = (text, onclick, more = {}) => make("button", {type: "button", className: "plain", textContent: text, onclick, ...more});
  const open = button(one.title, () => actions.open(one.id), {className: "plain open", title: one.title});
  const more = button("\u22ef", () => { opened = opened === one.id ? "" : one.id; showChats(current); focusMore(one.id); });
  more.className = "plain more";
  more.dataset.id = one.id;
  more.ariaLabel = `rename, export or delete: ${one.title}`;
  more.ariaExpanded = String(opened === one.id);
  const row = make("li", {className: is_current ? "current" : ""}, [open, more]);
  if (is_current) open.setAttribute("aria-current", "true");
  if (opened === one.id) {
    const choices = [
      button("Rename", () => rename(one)),
      button("Export", () => download([chats.load(one.id)], one.title)),
      button("Delete", () => remove(one)),
    ];
    row.append(make("div", {className: "choices"}, choices));
  }
  return row;
}

const focusMore = id => [...$("chat_list").querySelectorAll(".more")].find(one => one.dataset.id === id)?.focus();

async function rename(one) {
  const title = await ask("The name of this conversation", one.title);
  if (!title) return;
  const chat = chats.load(one.id);
  if (chat) chats.save(Object.assign(chat, {title}));
  opened = "";
  actions.rename(one.id, title);
}

async function remove(one) {
  if (!(await ask(`Delete \u201c${one.title}\u201d? It is nowhere else.`))) return;
  chats.remove(one.id);
  opened = "";
  actions.remove(one.id);
}

function download(list, name) {
  const text = JSON.stringify({version: 1, conversations: list}, null, 1);
  const link = make("a", {href: URL.createObjectURL(new Blob([text], {type: "application/json"}))});
  link.download = `${name.replace(/[^\w.-]+/g, "_").slice(0, 60) || "conversation"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Ask for a text, or without a value for a yes. Resolves to "" or false if the answer is no. */
function ask(text, value = null) {
  $("ask_text").textContent = text;
  $("ask_value").hidden = value === null;
  $("ask_value").value = value ?? "";
  $("ask").showModal();
  return new Promise(done => {
    const end = answer => { $("ask").onclose = null; $("ask").close(); done(answer); };
    $("ask_form").onsubmit = event => { event.preventDefault(); end(value === null || $("ask_value").value.trim()); };
    $("ask_no").onclick = () => end(false);
    $("ask").onclose = () => done(false);
  });
}

// --- settings and figures ---

const toggle = (name, button) => button.setAttribute("aria-expanded", document.body.classList.toggle(name));

/** On a small window, go back to the conversation. */
export function closeSmall() {
  if (innerWidth <= 1000) setPanel("with_settings", "show_settings", false);
  setPanel("with_chats", "show_chats", false);
}

function setPanel(name, button, is_open) {
  document.body.classList.toggle(name, is_open);
  $(button).setAttribute("aria-expanded", is_open);
}

/** Show where the key belongs. */
export function askKey() {
  setPanel("with_chats", "show_chats", false);
  setPanel("with_settings", "show_settings", true);
  $("key").focus();
}

function keepSettings() {
  const given = Object.fromEntries([...PARAMETERS, "key"].map(name => [name, $(name).value]));
  const is_open = innerWidth > 1000 ? document.body.classList.contains("with_settings") : chats.settings().is_open;
  chats.saveSettings({...given, model: wanted, is_open});
}

async function look() {
  const is_busy = document.body.classList.contains("busy");
  // With many models a look at one counts as a use of it, so it is looked at only while it answers.
  if (found.length && (!hasMany() || (is_busy && cardOf(model())?.state === "loaded"))) {
    try {
      showLoad(await server.load(key(), hasMany() ? model() : ""));
    } catch (error) {
      if (error.status !== 401) tell(error.message);
    }
  }
  setTimeout(look, document.hidden ? LOOK_HIDDEN_MS : LOOK_MS);
}

function showLoad(load) {
  const now = performance.now(), is_silent = load.age_s === null || load.age_s > 3;
  if (is_silent) tell("the engine does not answer");
  else if (!$("state").dataset.kind && $("state").textContent === "the engine does not answer") tell("");
  $("streams").textContent = load.streams;
  if (load.running === undefined) return;
  $("running").textContent = `${load.running} / ${load.max_running}`;
  $("waiting").textContent = load.waiting;
  $("kv").textContent = `${(100 * load.kv_used).toFixed(0)} %`;
  $("kv_meter").value = load.kv_used;
  if (last && now > last[0] && load.generated_tokens >= last[1]) {
    $("rate").textContent = ((load.generated_tokens - last[1]) * 1000 / (now - last[0])).toFixed(0);
  }
  last = [now, load.generated_tokens];
}

export function start(given) {
  actions = given;
  const kept = chats.settings();
  for (const name of [...PARAMETERS, "key"]) if (typeof kept[name] === "string") $(name).value = kept[name];
  wanted = typeof kept.model === "string" ? kept.model : "";
  setPanel("with_settings", "show_settings", innerWidth > 1000 && kept.is_open !== false);
  for (const name of PARAMETERS) $(name).addEventListener("change", keepSettings);
  $("key").addEventListener("change", () => { keepSettings(); tell(""); lookForModels(); });
  $("model").addEventListener("change", () => { wanted = $("model").value; last = null; keepSettings(); showModels(); });
  $("show_settings").addEventListener("click", () => {
    document.body.classList.remove("with_chats");
    toggle("with_settings", $("show_settings"));
    keepSettings();
  });
  $("show_chats").addEventListener("click", () => {
    document.body.classList.remove("with_settings");
    toggle("with_chats", $("show_chats"));
  });
  $("export_all").addEventListener("click", () => {
    const all = chats.list().map(one => chats.load(one.id));
    if (all.length) download(all, "conversations");
  });
  lookForModels();
  look();
}
