// The conversations, each under one key of the browser's storage, and the settings. The server keeps none of them.
//
// A conversation: {id, title, updated, system, model, messages}. A message: {role, content, images, reasoning, figures}.

const HOME = `engine-core:${location.pathname}:`; // several servers may be behind one host
const CHAT = `${HOME}chat:`;
const SETTINGS = `${HOME}settings`;
const MAX_TITLE = 60;

/** Return an object of the storage; null if there is none, or if it is damaged. */
function read(key) {
  try {
    const found = JSON.parse(localStorage.getItem(key));
    return typeof found === "object" ? found : null;
  } catch {
    return null;
  }
}

/** Return {id, title, updated} of all conversations, the latest first. */
export function list() {
  const found = [];
  for (const key of Object.keys(localStorage)) {
    const chat = key.startsWith(CHAT) ? load(key.slice(CHAT.length)) : null;
    if (chat) found.push({id: chat.id, title: chat.title, updated: chat.updated});
  }
  return found.sort((a, b) => b.updated - a.updated);
}

/** Return a conversation; null if it is not there. */
export function load(id) {
  const chat = read(CHAT + id);
  if (!chat || !Array.isArray(chat.messages)) return null;
  const messages = chat.messages.filter(one => one && typeof one.content === "string" && typeof one.role === "string");
  return {system: "", model: "", ...chat, id, title: String(chat.title || ""), updated: Number(chat.updated) || 0, messages};
}

/** Return a conversation without messages. It is kept once it has one. */
export function create(system) {
  return {id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", updated: 0, system, model: "", messages: []};
}

/** Keep a conversation. Return false if the browser's storage is full. */
export function save(chat) {
  chat.updated = Date.now();
  chat.title ||= titleOf(chat);
  return put(CHAT + chat.id, chat);
}

export function remove(id) {
  localStorage.removeItem(CHAT + id);
}

/** Return whether a key of the storage is one of a conversation, of any or of this one. */
export const isChat = (key, id = "") => key === null || key.startsWith(CHAT + id);

export const settings = () => read(SETTINGS) || {};
export const saveSettings = found => put(SETTINGS, found);

function put(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function titleOf(chat) {
  const first = chat.messages.find(one => one.role === "user");
  const text = first ? first.content.trim().replace(/\s+/g, " ") : "";
  return (text.length > MAX_TITLE ? `${text.slice(0, MAX_TITLE - 1)}\u2026` : text) || "Image";
}
