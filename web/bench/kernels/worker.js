/**
 * A Worker of the kernel bench: runs the section it is told and answers with its figures, or with why there are none.
 * Each section is a module of this folder.
 */

self.onmessage = async ({ data: { section, plan } }) => {
  try {
    const { run } = await import(`./${section}.js`);
    self.postMessage({ value: await run(plan) });
  } catch (error) {
    self.postMessage({ error: error instanceof Error ? `${error.name}: ${error.message}` : String(error) });
  }
};
