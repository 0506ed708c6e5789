/* Cells that are run before the kernel is connected wait for it.
 *
 * JupyterLab shows a notebook before it starts its kernel, which takes seconds on a busy node. A cell that is run in
 * between is dropped without a word: its prompt stays empty, and nothing is ever executed.
 *
 * A container of webpack's module federation written by hand, as carme-session/static/shared.js says.
 */
(() => {
  'use strict';

  let shared = {};
  const helping = import(new URL('../../carme-session/static/shared.js', document.currentScript.src));

  /** Wait until a notebook that is being opened has its kernel, or it is known that its user must choose one. */
  async function settled(sessionContext, notebook) {
    const coming = ['initializing', 'starting'].includes(sessionContext.kernelDisplayStatus);
    if (sessionContext.session?.kernel || sessionContext.isReady || !coming) {
      return;
    }
    // What the document itself does next, when it has requested its checkpoints; both get the same promise.
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

  function plugin(notebook) {
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
    init: packages => {
      shared = packages;
    },
    get: async () => (await helping).extension(shared, ['@jupyterlab/notebook'], plugin, false)
  };
})();
