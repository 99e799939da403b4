// @openai/codex: a turn over /v1/responses, from a provider of its settings and as it uses Ollama (--oss).
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const { MODEL, SERVER } = process.env;
const folder = mkdtempSync(join(tmpdir(), "codex-"));
mkdirSync(join(folder, "work"));
const settings = `
model = "${MODEL}"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "${SERVER}/v1"
wire_api = "responses"
`;
const run = (options) => {
  const program = join(import.meta.dirname, "node_modules/.bin/codex");
  const env = { ...process.env, HOME: folder, CODEX_HOME: folder, CODEX_OSS_BASE_URL: `${SERVER}/v1` };
  const last = join(folder, "last");
  const all = ["exec", "--skip-git-repo-check", "--output-last-message", last, ...options, "Say hello."];
  const ended = spawnSync(program, all, { cwd: join(folder, "work"), env, encoding: "utf8", input: "", timeout: 240_000 });
  assert.equal(ended.status, 0, ended.stderr);
  assert(ended.stdout.trim(), ended.stderr);
};
try {
  writeFileSync(join(folder, "config.toml"), settings);
  run([]);
  run(["--oss", "--local-provider", "ollama", "-m", MODEL]);
} finally {
  rmSync(folder, { recursive: true, force: true });
}
