// @anthropic-ai/claude-code: a turn over /v1/messages with one tool; its own first message is too long for the model.
import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const { MODEL, SERVER } = process.env;
execFileSync("node", [join(import.meta.dirname, "node_modules/@anthropic-ai/claude-code/install.cjs")]); // npm may not run it
const folder = mkdtempSync(join(tmpdir(), "claude-"));
const env = {
  ...process.env,
  HOME: folder,
  ANTHROPIC_BASE_URL: SERVER,
  ANTHROPIC_AUTH_TOKEN: "none",
  ANTHROPIC_MODEL: MODEL,
  ANTHROPIC_SMALL_FAST_MODEL: MODEL,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  CLAUDE_CODE_MAX_OUTPUT_TOKENS: "256", // the model may go on until its context is full
};
try {
  const program = join(import.meta.dirname, "node_modules/.bin/claude");
  const options = ["-p", "Say hello.", "--system-prompt", "Be brief.", "--tools", "Read", "--output-format", "json"];
  const ended = spawnSync(program, options, { cwd: folder, env, encoding: "utf8", input: "", timeout: 240_000 });
  assert.notEqual(ended.stdout, "", ended.stderr);
  const answer = JSON.parse(ended.stdout);
  if (answer.is_error) {
    assert.match(answer.result, /exceeded the 256 output token maximum/, ended.stdout); // it has read why the answer ended
  } else {
    assert.equal(ended.status, 0, ended.stdout + ended.stderr);
    assert(answer.result);
  }
  assert(answer.usage.output_tokens > 0);
} finally {
  rmSync(folder, { recursive: true, force: true });
}
