// Validates an AsyncAPI document: node asyncapi.cjs FILE. Any diagnostic, a hint included, fails.
const fs = require('fs');
const { Parser } = require('@asyncapi/parser');

const file = process.argv[2];
new Parser().validate(fs.readFileSync(file, 'utf8')).then((diagnostics) => {
  for (const d of diagnostics) {
    console.error(`${file}:${d.range.start.line + 1} ${d.code}: ${d.message}`);
  }
  process.exit(diagnostics.length > 0 ? 1 : 0);
});
