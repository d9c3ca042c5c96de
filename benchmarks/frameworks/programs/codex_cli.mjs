// Codex: node codex_cli.mjs BASE_URL KEY, in a folder with its package. Its tools are those of an MCP server, this file.
import { spawnSync } from 'node:child_process';
import { appendFileSync, existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { McpServer } from '@modelcontextprotocol/sdk/server/mcp.js';
import { StdioServerTransport } from '@modelcontextprotocol/sdk/server/stdio.js';
import { z } from 'zod';

const own = fileURLToPath(import.meta.url);
const [baseURL, apiKey] = process.argv.slice(2);
const questions = ['What is 3 + 4, and what is 5 + 6? Ask for both at once.', 'Now multiply both sums.'];

async function serve(kept) {
  const server = new McpServer({ name: 'calc', version: '1' });
  const made = (name, word, of) =>
    server.tool(name, name, { a: z.number(), b: z.number() }, async ({ a, b }) => {
      appendFileSync(kept, JSON.stringify([name, a, b]) + '\n');
      return { content: [{ type: 'text', text: `${word}=${of(a, b)}` }] };
    });
  made('add', 'sum', (a, b) => a + b);
  made('multiply', 'product', (a, b) => a * b);
  await server.connect(new StdioServerTransport());
}

function hold() {
  const home = process.cwd();
  const kept = `${home}/calls`;
  mkdirSync(`${home}/codex`);
  writeFileSync(
    `${home}/codex/config.toml`,
    [
      'model = "policy"',
      'model_provider = "ours"',
      'approval_policy = "never"',
      '[model_providers.ours]',
      'name = "ours"',
      `base_url = "${baseURL}"`,
      'env_key = "OURS_KEY"',
      'wire_api = "responses"',
      '[mcp_servers.calc]',
      `command = "${process.execPath}"`,
      `args = ["${own}", "--serve", "${kept}"]`,
    ].join('\n') + '\n',
  );
  const codex = own.replace(/[^/]*$/, 'node_modules/.bin/codex');
  const env = { ...process.env, CODEX_HOME: `${home}/codex`, OURS_KEY: apiKey };
  const answers = questions.map((question, number) => {
    const words = ['exec', '--skip-git-repo-check', '--dangerously-bypass-approvals-and-sandbox', '-o', `${home}/last`];
    const turn = number ? ['resume', '--last', question] : [question];
    const ran = spawnSync(codex, [...words, ...turn], { env, encoding: 'utf8', stdio: ['ignore', 'pipe', 'pipe'] });
    if (ran.status) console.error(ran.stderr.trim());
    return existsSync(`${home}/last`) ? readFileSync(`${home}/last`, 'utf8') : '';
  });
  const calls = existsSync(kept) ? readFileSync(kept, 'utf8').trim().split('\n').map((line) => JSON.parse(line)) : [];
  console.log(JSON.stringify({ answers, calls }));
}

if (baseURL === '--serve') await serve(apiKey);
else hold();
