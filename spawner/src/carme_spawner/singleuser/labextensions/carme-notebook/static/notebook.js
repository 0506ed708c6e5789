/* Cells that are run before the kernel is connected wait for it.
 *
 * JupyterLab shows a notebook before it starts its kernel, which takes seconds on a busy node. A cell that is run in
 * between is dropped without a word: its prompt stays empty, and nothing is ever executed.
 *
 * This is a container of webpack's module federation, written by hand so that it needs no build: JupyterLab calls
 * init() with the packages that it shares, and get() for the plugin.
 */
(() => {
  'use strict';

  let shared = {};

  /** The module that JupyterLab itself uses under this name. */
  async function load(name) {
    const versions = Object.values(shared[name] || {});
    const entry = versions.find(version => version.loaded) || versions[0];
    if (!entry) {
      throw new Error(`JupyterLab does not share ${name}.`);
    }
    return (await entry.get())();
  }

  /** Wait until a notebook that is being opened has its kernel, or it is known that its user must choose one. */
  async function settled(sessionContext, notebook) {
    const coming = ['initializing', 'starting'].includes(sessionContext.kernelDisplayStatus);
    if (sessionContext.session?.kernel || sessionContext.isReady || !coming) {
      return;
    }
    // What the document itself does next, when it has asked for its checkpoints; both get the same promise.
    const preference = sessionContext.kernelPreference;
    const name = notebook.defaultKernelName || preference.name;
    sessionContext.kernelPreference = { ...preference, name, language: notebook.defaultKernelLanguage };
    await sessionContext.initialize();
  }

  /** JupyterLab's own executor of cells, after that. */
  function makeExecutor(runCell) {
    return Object.freeze({
      runCell: async options => {
        const { cell, notebook, sessionContext } = options;
        if (cell.model.type === 'code' && sessionContext) {
          cell.setPrompt?.('*');
          // JupyterLab itself says why a kernel did not start.
          await settled(sessionContext, notebook).catch(() => undefined);
        }
        return runCell(options);
      }
    });
  }

  async function plugin() {
    const notebook = await load('@jupyterlab/notebook');
    return {
      id: 'carme-notebook:cell-executor',
      description: 'Runs cells, those before the kernel is connected too.',
      autoStart: true,
      provides: notebook.INotebookCellExecutor,
      activate: () => makeExecutor(notebook.runCell)
    };
  }

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB['carme-notebook'] = {
    init: scope => {
      shared = scope;
    },
    get: async () => {
      const made = await plugin();
      return () => ({ __esModule: true, default: made });
    }
  };
})();
