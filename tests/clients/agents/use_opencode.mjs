// opencode-ai: a turn over /v1/chat/completions with its tools; its own first message is too long for the model.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const { MODEL, SERVER } = process.env;
const folder = mkdtempSync(join(tmpdir(), "opencode-")), work = join(folder, "work");
mkdirSync(work);
const models = { [MODEL]: { name: MODEL, limit: { context: 8192, output: 64 } } };
const provider = { npm: "@ai-sdk/openai-compatible", name: "here", options: { baseURL: `${SERVER}/v1` }, models };
const tools = { "*": false, read: true };
const settings = {
  provider: { here: provider },
  model: `here/${MODEL}`,
  small_model: `here/${MODEL}`,
  agent: { build: { prompt: "Be brief.", tools } },
  share: "disabled",
  autoupdate: false,
};
const env = { ...process.env, HOME: folder, PWD: work, OPENCODE_DISABLE_MODELS_FETCH: "1", OPENCODE_DISABLE_AUTOUPDATE: "1" };
for (const name of ["CONFIG", "DATA", "STATE", "CACHE"]) env[`XDG_${name}_HOME`] = join(folder, name.toLowerCase());
try {
  writeFileSync(join(work, "opencode.json"), JSON.stringify(settings));
  const program = join(import.meta.dirname, "node_modules/.bin/opencode");
  const options = ["run", "--format", "json", "-m", `here/${MODEL}`, "Say hello."];
  const ended = spawnSync(program, options, { cwd: work, env, encoding: "utf8", input: "", timeout: 240_000 });
  assert.equal(ended.status, 0, ended.stdout + ended.stderr);
  const events = ended.stdout.trim().split("\n").map((line) => JSON.parse(line));
  assert(events.some((one) => one.type === "text" && one.part.text), ended.stdout + ended.stderr);
  const [finish] = events.filter((one) => one.type === "step_finish");
  assert(finish.part.tokens.output > 0, ended.stdout);
} finally {
  rmSync(folder, { recursive: true, force: true });
}
