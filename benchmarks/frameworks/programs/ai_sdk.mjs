// The same for Vercel's AI SDK: node ai_sdk.mjs BASE_URL KEY VARIANT, in a folder with its packages.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, tool } from 'ai';
import { z } from 'zod';

const [baseURL, apiKey, variant] = process.argv.slice(2);
const questions = ['What is 3 + 4, and what is 5 + 6? Ask for both at once.', 'Now multiply both sums.'];
const model = {
  responses: () => createOpenAI({ baseURL, apiKey })('policy'),
  chat: () => createOpenAI({ baseURL, apiKey }).chat('policy'),
  compatible: () => createOpenAICompatible({ name: 'ours', baseURL, apiKey })('policy'),
  messages: () => createAnthropic({ baseURL, apiKey })('policy'),
}[variant]();
const calls = [];
const numbers = z.object({ a: z.number(), b: z.number() });
const made = (name, word, of) =>
  tool({
    description: name,
    inputSchema: numbers,
    execute: async ({ a, b }) => {
      calls.push([name, a, b]);
      return `${word}=${of(a, b)}`;
    },
  });
const tools = { add: made('add', 'sum', (a, b) => a + b), multiply: made('multiply', 'product', (a, b) => a * b) };
const messages = [];
const answers = [];
for (const content of questions) {
  messages.push({ role: 'user', content });
  const result = await generateText({ model, messages, tools, stopWhen: stepCountIs(4) });
  messages.push(...result.response.messages);
  answers.push(result.text);
}
console.log(JSON.stringify({ answers, calls }));
