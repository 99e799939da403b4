// The page: the conversation that is shown, and what its controls do.

import * as chats from "./chats.js";
import * as images from "./images.js";
import {plain, render} from "./markdown.js";
import * as panels from "./panels.js";
import {$, make} from "./elements.js";
import {stream} from "./server.js";

let chat = chats.create(""); // the one that is shown
let controller = null; // of the answer that arrives
let pictures = []; // of the next message

// --- what is shown ---

function show() {
  $("chat").replaceChildren();
  $("system").value = chat.system;
  if (!chat.messages.length) {
    $("chat").append(make("p", {className: "empty", textContent: "Ask the model something. Conversations are kept in this browser only."}));
  }
  chat.messages.forEach((message, index) => $("chat").append(turnOf(message, index)));
  if (chat.messages.at(-1)?.role === "user") $("chat").append(failure("There is no answer to this yet."));
  document.title = chat.title ? `${chat.title} - engine-core` : "engine-core";
  panels.showChats(chat.id);
  $("chat").scrollTop = $("chat").scrollHeight;
}

function turnOf(message, index) {
  const words = make("div", {className: "words"}), is_user = message.role === "user";
  words.append(is_user ? plain(message.content) : render(message.content));
  const turn = make("article", {className: `turn ${message.role}`, ariaLabel: is_user ? "you" : "the model"});
  if (message.images?.length) turn.append(make("div", {className: "pictures"}, message.images.map(pictureOf)));
  if (message.reasoning) turn.append(thoughtOf(message.reasoning));
  if (message.content || !message.images?.length) turn.append(words);
  const figures = make("span", {className: "figures"}, (message.figures || []).map(figureOf));
  const buttons = [button("Copy", () => copy(message.content))];
  if (is_user && index >= chat.messages.length - 2) buttons.unshift(button("Edit", () => edit(index)));
  if (!is_user && index === chat.messages.length - 1) buttons.push(button("Try again", () => retry(index)));
  turn.append(make("div", {className: "under"}, [...(is_user ? [] : [figures]), ...buttons]));
  return turn;
}

const button = (text, onclick) => make("button", {type: "button", className: "plain", textContent: text, onclick});
const figureOf = ([text, kind]) => make("span", {textContent: text, className: kind === "cached" ? kind : ""});
const pictureOf = url => make("img", {src: String(url).startsWith("data:image/") ? url : "", alt: "an image of this message"});

function thoughtOf(text) {
  const box = make("details", {className: "thought"}, [make("summary", {textContent: "Reasoning"})]);
  box.append(plain(text));
  return box;
}

function failure(text) {
  const box = make("div", {className: "error"}, [make("span", {textContent: `${text} `})]);
  box.setAttribute("role", "alert");
  box.append(button("Try again", () => retry(chat.messages.length)));
  return box;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied");
  } catch {
    say("The browser does not allow copying here");
  }
}

const say = text => { $("spoken").textContent = text; };

function keep(kept = chat) {
  if (kept.is_removed) return;
  const is_kept = chats.save(kept);
  $("storage").textContent = is_kept ? "" : "The browser's storage is full: this conversation is not kept. Delete others.";
  panels.showChats(chat.id);
  if (kept === chat) document.title = `${chat.title} - engine-core`;
}

// --- questions and answers ---

function edit(index) {
  if (controller) return;
  const [message] = chat.messages.splice(index);
  $("text").value = message.content;
  pictures = message.images || [];
  showPictures();
  if (chat.messages.length) keep();
  show();
  $("text").focus();
}

function retry(length) {
  if (controller) return;
  chat.messages.length = length;
  show();
  answer();
}

function send() {
  const text = $("text").value.trim();
  if (controller || !(text || pictures.length)) return;
  chat.messages.push({role: "user", content: text, ...(pictures.length ? {images: pictures} : {})});
  $("text").value = "";
  pictures = [];
  showPictures();
  show();
  answer();
}

/** The request for an answer to the conversation as it is. */
function bodyOf() {
  const parts = one => [
    ...one.images.map(url => ({type: "image_url", image_url: {url}})),
    ...(one.content ? [{type: "text", text: one.content}] : []),
  ];
  const said = chat.messages.map(one => ({role: one.role, content: one.images?.length ? parts(one) : one.content}));
  const messages = chat.system.trim() ? [{role: "system", content: chat.system.trim()}, ...said] : said;
  return {model: panels.model(), messages, stream: true, stream_options: {include_usage: true}, ...panels.parameters()};
}

/** Ask for the next answer, and show it as it arrives. */
async function answer() {
  const mine = chat, message = {role: "assistant", content: ""};
  chat.model = panels.model();
  keep();
  $("chat").querySelector(".error")?.remove();
  const live = new Live(), begin = performance.now();
  let first = 0, usage = null, reason = "", problem = "";
  controller = new AbortController();
  setBusy(true);
  try {
    for await (const event of stream(panels.key(), bodyOf(), controller.signal)) {
      usage = event.usage || usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const {content, reasoning} = choice.delta;
      if (content || reasoning) first ||= performance.now();
      message.content += content || "";
      if (reasoning) message.reasoning = (message.reasoning || "") + reasoning;
      reason = choice.finish_reason || reason;
      live.update(message);
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else problem = error.message;
    if (error.status === 401) panels.askKey();
  }
  controller = null;
  live.close();
  if (message.content || message.reasoning || (usage && !problem)) {
    message.figures = figuresOf({begin, first, usage, reason: problem ? "error" : reason});
    mine.messages.push(message);
    keep(mine);
  }
  setBusy(false);
  if (mine !== chat) return; // another one was opened
  show();
  if (problem) {
    $("chat").querySelector(".error")?.remove();
    $("chat").append(failure(problem));
    $("chat").scrollTop = $("chat").scrollHeight;
  } else say(`The answer is complete: ${message.content.slice(0, 2000)}`);
  $("text").focus();
}

/** What is shown under an answer: [text, kind] of each figure. */
function figuresOf({begin, first, usage, reason}) {
  const found = [], count = usage?.completion_tokens, cached = usage?.prompt_tokens_details?.cached_tokens;
  if (usage) {
    found.push([`${usage.prompt_tokens} tokens in`, ""]);
    if (cached !== undefined) found.push([`${cached} cached`, cached ? "cached" : ""]);
    found.push([`${count} out`, ""]);
  }
  if (first) found.push([`first token ${((first - begin) / 1000).toFixed(2)} s`, ""]);
  if (first && count > 1) found.push([`${((count - 1) * 1000 / (performance.now() - first)).toFixed(1)} tokens/s`, ""]);
  if (reason && reason !== "stop") found.push([reason === "length" ? "ended by its length" : reason, ""]);
  return found;
}

/** The answer that arrives. It is rendered again after a pause that grows with the time that this takes. */
class Live {
  constructor() {
    this.words = make("div", {className: "words"}, [make("span", {className: "waiting", textContent: panels.waitingText()})]);
    this.turn = make("article", {className: "turn assistant", ariaBusy: "true", ariaLabel: "the model"}, [this.words]);
    this.timer = 0;
    $("chat").append(this.turn);
    $("chat").scrollTop = $("chat").scrollHeight;
  }

  update(message) {
    this.message = message;
    this.timer ||= setTimeout(() => this.draw(), this.pause || 0);
  }

  draw() {
    const box = $("chat"), is_at_end = box.scrollHeight - box.scrollTop - box.clientHeight < 60, begin = performance.now();
    const {content, reasoning} = this.message;
    if (reasoning) {
      if (!this.thought) this.turn.prepend(this.thought = Object.assign(thoughtOf(""), {open: true}));
      this.thought.lastChild.textContent = reasoning;
      if (content && !this.has_content) this.thought.open = false;
    }
    if (content) this.words.replaceChildren(render(content));
    this.has_content = !!content;
    if (is_at_end) box.scrollTop = box.scrollHeight;
    this.pause = Math.max(40, 4 * (performance.now() - begin));
    this.timer = 0;
  }

  close() {
    clearTimeout(this.timer);
    this.turn.remove();
  }
}

function setBusy(is_busy) {
  $("send").hidden = is_busy;
  $("stop").hidden = !is_busy;
  document.body.classList.toggle("busy", is_busy);
}

// --- images of the next message ---

function showPictures() {
  $("images").replaceChildren(...pictures.map((url, index) => {
    const remove = make("button", {type: "button", textContent: "\u00d7", ariaLabel: `remove image ${index + 1}`});
    remove.onclick = () => { pictures.splice(index, 1); showPictures(); };
    return make("figure", {}, [make("img", {src: url, alt: `image ${index + 1}`}), remove]);
  }));
}

async function addFiles(files) {
  panels.tell("");
  for (const file of files) {
    if (!panels.takesImages()) return panels.tell("this model takes no images");
    if (pictures.length >= images.MAX_IMAGES) return panels.tell(`a message may have ${images.MAX_IMAGES} images`);
    try {
      pictures.push(await images.read(file));
    } catch (error) {
      panels.tell(error.message);
    }
    showPictures();
  }
}

// --- events ---

function open(id) {
  if (controller) controller.abort();
  chat = chats.load(id) || chats.create("");
  if (chat.model) panels.choose(chat.model);
  show();
  panels.closeSmall();
}

function begin() {
  if (controller) controller.abort();
  chat = chats.create("");
  show();
  panels.closeSmall();
  $("text").focus();
}

$("form").addEventListener("submit", event => { event.preventDefault(); send(); });
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("text").addEventListener("paste", event => {
  const files = [...event.clipboardData.files];
  if (files.length) { event.preventDefault(); addFiles(files); }
});
$("form").addEventListener("dragover", event => event.preventDefault());
$("form").addEventListener("drop", event => { event.preventDefault(); addFiles([...event.dataTransfer.files]); });
$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => { addFiles([...$("files").files]); $("files").value = ""; });
$("stop").addEventListener("click", () => controller?.abort());
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && controller && !$("ask").open) controller.abort();
});
$("chat").addEventListener("click", event => {
  const block = event.target.closest(".copy_code")?.closest(".code");
  if (block) copy(block.querySelector("code").textContent);
});
$("system").addEventListener("change", () => {
  chat.system = $("system").value;
  if (chat.messages.length) keep();
});
$("new_chat").addEventListener("click", begin);
addEventListener("storage", event => { // another tab
  if (!chats.isChat(event.key)) return;
  if (!controller && chat.messages.length && chats.isChat(event.key, chat.id)) open(chat.id);
  else panels.showChats(chat.id);
});

if (!CSS.supports("field-sizing", "content")) $("text").rows = 3;
panels.start({
  open,
  rename(id, title) {
    if (id === chat.id) {
      chat.title = title;
      document.title = `${title} - engine-core`;
    }
    panels.showChats(chat.id);
  },
  remove(id) {
    if (id !== chat.id) return panels.showChats(chat.id);
    chat.is_removed = true; // an answer that arrives for it is not kept
    begin();
  },
});
const latest = chats.list()[0];
if (latest) open(latest.id);
else show();
