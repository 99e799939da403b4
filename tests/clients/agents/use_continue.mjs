// @continuedev/cli: a turn of Continue's command line over /v1/chat/completions, without its tools.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const { MODEL, SERVER } = process.env;
const folder = mkdtempSync(join(tmpdir(), "continue-"));
const settings = {
  name: "here",
  version: "1.0.0",
  schema: "v1",
  models: [
    {
      name: MODEL,
      provider: "openai",
      model: MODEL,
      apiBase: `${SERVER}/v1`,
      apiKey: "none",
      roles: ["chat"],
      defaultCompletionOptions: { contextLength: 8192, maxTokens: 64 },
    },
  ],
};
const env = { ...process.env, HOME: folder, CONTINUE_GLOBAL_DIR: join(folder, "global"), CONTINUE_TELEMETRY_ENABLED: "0" };
try {
  writeFileSync(join(folder, "config.yaml"), JSON.stringify(settings)); // JSON is YAML
  const program = join(import.meta.dirname, "node_modules/.bin/cn");
  const options = ["-p", "--config", join(folder, "config.yaml"), "--exclude", "*", "Say hello."];
  const ended = spawnSync(program, options, { cwd: folder, env, encoding: "utf8", input: "", timeout: 240_000 });
  assert.equal(ended.status, 0, ended.stdout + ended.stderr);
  assert(ended.stdout.trim(), ended.stderr);
} finally {
  rmSync(folder, { recursive: true, force: true });
}
