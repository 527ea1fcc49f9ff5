// Opens a Jupyter server in Debian's Chromium as a person would: logs in, runs a cell of a new notebook, prints the
// result.
//   node notebook.mjs URL PROFILE_DIR < password
import { readFileSync } from 'node:fs';
import { chromium } from 'playwright-core';

const [url, profile] = process.argv.slice(2);
const password = readFileSync(0, 'utf8').trim();
const context = await chromium.launchPersistentContext(profile, {
  executablePath: '/usr/bin/chromium',
  headless: true,
  args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
    '--disable-component-update', '--disable-sync', '--disable-dev-shm-usage'],
});
try {
  const page = await context.newPage();
  page.setDefaultTimeout(120_000);
  await page.goto(`${url}/login`);
  await page.fill('#password_input', password);
  await page.click('#login_submit');
  await page.waitForURL('**/tree**');
  await page.click('#new-dropdown-button');
  const [notebook] = await Promise.all([context.waitForEvent('page'), page.click('#kernel-python3 a')]);
  notebook.setDefaultTimeout(120_000);
  await notebook.waitForSelector('.kernel_idle_icon');
  await notebook.click('.CodeMirror');
  await notebook.keyboard.type('6 * 7');
  await notebook.keyboard.press('Shift+Enter');
  const result = notebook.locator('.output_result pre').first();
  await result.waitFor();
  console.log(JSON.stringify({ result: (await result.textContent()).trim() }));
} finally {
  await context.close();
}
