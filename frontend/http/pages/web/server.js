// Calls of this server's API. All paths are relative, so the page works under any path of a proxy.

/** A refusal of the server. status: of HTTP, 0 = the server was not reached. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const headersOf = key => ({"content-type": "application/json", ...(key ? {authorization: `Bearer ${key}`} : {})});

async function call(path, key, options = {}) {
  let response;
  try {
    response = await fetch(path, {headers: headersOf(key), ...options});
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refused("the server does not answer", 0);
  }
  if (response.ok) return response;
  let message = `the server answered with status ${response.status}`;
  try {
    message = (await response.json()).error.message || message;
  } catch { /* a proxy's page */ }
  throw new Refused(message, response.status);
}

export const models = async key => (await (await call("v1/models", key)).json()).data;

/** Return the load of an engine. model: "" on a server with one model. */
export const load = async (key, model) =>
  (await call(`v1/load${model && `?model=${encodeURIComponent(model)}`}`, key)).json();

/** Yield the events of a chat. Errors: Refused; AbortError of the signal. */
export async function* stream(key, body, signal) {
  const response = await call("v1/chat/completions", key, {method: "POST", body: JSON.stringify(body), signal});
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) throw new Refused("the connection ended before the answer did", 0);
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (!part.startsWith("data: ")) continue; // a comment: the server is alive
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Refused(event.error.message, event.error.code);
      yield event;
    }
  }
}
