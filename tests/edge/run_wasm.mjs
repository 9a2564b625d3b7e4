// Runs Python code in MicroPython's WebAssembly build, whose files are in memory only.
// node run_wasm.mjs PACKAGE ROOT CODE FILE...: the files, relative to ROOT, lie under /app, which is on sys.path.
// A line "#call" in CODE ends one call of the interpreter: between two calls it can collect all garbage.
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

const [packageFolder, root, code, ...files] = process.argv.slice(2);
const { loadMicroPython } = await import(pathToFileURL(join(packageFolder, "micropython.mjs")));
const python = await loadMicroPython({
  heapsize: 1024 * 1024,
  stdout: (line) => process.stdout.write(line + "\n"),
  stderr: (line) => process.stdout.write(line + "\n"),
});
for (const file of files) {
  python.FS.mkdirTree(dirname("/app/" + file));
  python.FS.writeFile("/app/" + file, readFileSync(join(root, file)));
}
try {
  python.runPython("import sys\nsys.path.insert(0, '/app')");
  for (const part of code.split("\n#call\n")) python.runPython(part);
} catch (error) {
  process.stdout.write(String(error.message ?? error) + "\n");
  process.exitCode = 1;
}
