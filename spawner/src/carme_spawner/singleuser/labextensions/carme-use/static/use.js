/* What the session uses, in a panel at JupyterLab's side: curves of GPUs, memory and processors, and the advice.
 *
 * What it shows is the part of the job's page in the portal, which has the same origin: the browser asks for it as
 * who is signed in there. A container of webpack's module federation written by hand, as carme-session/static/shared.js says.
 */
(() => {
  'use strict';

  const ASK_MS = 15000;
  /** Where the part of the portal's page stands, which brings no style along: in the panel, and below cells. */
  const PART = ':is(#carme-use, .carme-report)';
  const STYLE = `
    #carme-use { overflow: auto; padding: 8px 12px; background: var(--jp-layout-color1); }
    .carme-report { padding: 4px 12px; }
    ${PART} { color: var(--jp-ui-font-color1); }
    ${PART} h2 { font-size: 1.1em; margin: 4px 0 8px; }
    ${PART} h3 { font-size: 1em; margin: 12px 0 2px; }
    ${PART} th { text-align: left; vertical-align: top; padding-right: 8px; font-weight: 600; white-space: pre; }
    ${PART} td { white-space: pre-wrap; overflow-wrap: anywhere; }
    ${PART} table { font-size: 0.9em; }
    ${PART} pre { background: var(--jp-layout-color2); padding: 4px 6px; white-space: pre-wrap; }
    ${PART} ul { padding-left: 16px; }
    ${PART} meter { width: 72px; margin-right: 6px; vertical-align: middle; }
    ${PART} summary { cursor: pointer; margin: 4px 0; min-height: 24px; }
    ${PART} .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 4px 16px; }
    ${PART} .chart { min-width: 0; }
    ${PART} .multiples { display: grid; grid-template-columns: repeat(auto-fill, minmax(104px, 1fr)); gap: 6px; padding: 0; margin: 4px 0; list-style: none; }
    ${PART} .multiples li { min-width: 0; padding: 4px 6px; border: 1px solid var(--jp-border-color2); border-radius: 4px; font-size: 0.85em; }
    ${PART} .legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 4px 0; font-size: 0.9em; }
    ${PART} .stroke { display: inline-block; width: 22px; vertical-align: middle; border-top: 3px solid #0072b2; }
    ${PART} .stroke-2 { border-top: 3px dashed #c04a00; }
    [data-jp-theme-light='false'] ${PART} .stroke { border-top-color: #56b4e9; }
    [data-jp-theme-light='false'] ${PART} .stroke-2 { border-top-color: #e69f00; }`;
  /** What `%carme_report` displays: `{"job": 123}`. */
  const REPORT = 'application/vnd.carme.report+json';

  let shared = {};
  /** What all extensions of the session share, shared.js, once it is there. */
  let help;
  const helping = import(new URL('../../carme-session/static/shared.js', document.currentScript.src));

  const say = (...sentence) => help.say(...sentence);
  const signedOut = () => say('The portal does not know who you are any more. Sign in there again, in another tab.');
  const noAnswer = () => say('The portal does not answer just now.');

  /** The part of the job's page, or a sentence instead. */
  async function partOf(job) {
    const response = await fetch(`/jobs/${job}/use/`, { cache: 'no-store', redirect: 'manual' });
    if (response.status === 404) {
      return say('There is no job {job} of yours.', { job });
    }
    if (!response.ok) {
      return response.type === 'opaqueredirect' ? signedOut() : noAnswer();
    }
    const page = new DOMParser().parseFromString(await response.text(), 'text/html');
    return page.querySelector('#use') || signedOut();
  }

  /** A script of the portal, once it has run; it writes numbers and times in the language of the portal's part. */
  function script(address, { dataset, lang }) {
    const node = Object.assign(document.createElement('script'), { src: address, lang, async: false });
    node.dataset.style = dataset.style;
    document.head.append(node);
    return new Promise((resolve, reject) => {
      node.addEventListener('load', resolve);
      node.addEventListener('error', reject);
    });
  }

  let charts = null;

  /** What draws the portal's charts, loaded once; without it the numbers and the advice are there. */
  function loadCharts(part) {
    charts = charts || script(part.dataset.plots, part).then(() => script(part.dataset.charts, part));
    return charts.catch(() => (charts = null));
  }

  /** Show a job's report in an element, if it is still wanted; whether it may change. */
  async function showReport(node, job, wanted) {
    let shown;
    try {
      shown = await partOf(job);
    } catch {
      shown = noAnswer();
    }
    if (!wanted()) {
      return false;
    }
    const active = !shown.dataset || shown.hasAttribute('hx-get');
    if (shown.dataset) {
      // The panel may show the same part: names that others refer to are there once.
      shown.setAttribute('aria-label', say('Report of job {job}', { job }));
      for (const part of [shown, ...shown.querySelectorAll('[id]')]) {
        part.removeAttribute('id');
      }
      shown.removeAttribute('aria-labelledby');
    }
    node.replaceChildren(shown);
    if (shown.dataset && shown.dataset.charts) {
      await loadCharts(shown);
    }
    return active && wanted();
  }

  /** Draw what `%carme_report` displays; it is fetched as the user who is signed in, so nobody else's job can be seen. */
  function reportFactory({ widgets }) {
    class Report extends widgets.Widget {
      constructor() {
        super({ node: document.createElement('div') });
        this.addClass('carme-report');
        this.generation = 0;
      }

      async renderModel(model) {
        const { job } = model.data[REPORT] || {};
        this.stop?.();
        this.generation += 1;
        if (!Number.isSafeInteger(job) || job < 1) {
          this.node.textContent = say('This output names no job.');
          return;
        }
        const { generation } = this;
        let last = 0; // an answer that comes after a later round began shows what was before
        const refresh = async () => {
          last += 1;
          const round = last;
          const wanted = () => !this.isDisposed && generation === this.generation && round === last;
          if (!(await showReport(this.node, job, wanted)) && wanted()) {
            stop();
          }
        };
        const stop = help.poll(refresh, ASK_MS, () => this.isVisible && !document.hidden);
        this.stop = stop;
        await refresh();
      }

      dispose() {
        this.stop?.();
        super.dispose();
      }
    }
    return { safe: true, mimeTypes: [REPORT], createRenderer: () => new Report() };
  }

  function activate(app, palette, rendermime, { services, widgets }) {
    rendermime?.addFactory(reportFactory({ widgets }), 40);
    class Panel extends widgets.Widget {
      /** JupyterLab calls it when the panel is opened: the keyboard scrolls it then. */
      onActivateRequest() {
        this.node.focus();
      }
    }
    const panel = new Panel({ node: document.createElement('div') });
    panel.id = 'carme-use';
    panel.title.caption = say('What this session uses, and advice');
    panel.title.label = say('Use');
    panel.node.setAttribute('role', 'region');
    panel.node.tabIndex = 0;
    panel.node.setAttribute('aria-label', panel.title.caption);
    const style = document.createElement('style');
    style.textContent = STYLE;
    const body = document.createElement('div');
    body.textContent = say('Loading what this session uses.'); // until the first answer
    panel.node.append(style, body);
    app.shell.add(panel, 'right', { rank: 900 });

    let job = null;
    const isSeen = () => panel.isVisible && !document.hidden;
    async function refresh() {
      let shown;
      try {
        job = job || (await help.ask(services, 'carme/status')).job;
        shown = job ? await partOf(job) : say('This server runs outside of a job.');
      } catch {
        shown = noAnswer();
      }
      body.replaceChildren(shown);
      if (shown.dataset && shown.dataset.charts) {
        await loadCharts(shown);
      }
    }

    app.commands.addCommand('carme:use', {
      label: say('Show What This Session Uses'),
      caption: panel.title.caption,
      execute: async () => {
        await Promise.resolve(); // the list of commands gives the focus back to the document first
        app.shell.activateById(panel.id);
        await refresh();
      }
    });
    if (palette) {
      palette.addItem({ command: 'carme:use', category: say('Session') });
    }
    const opened = new MutationObserver(() => isSeen() && refresh());
    opened.observe(panel.node, { attributes: true, attributeFilter: ['class'] });
    help.poll(refresh, ASK_MS, isSeen);
  }

  const PACKAGES = ['@jupyterlab/apputils', '@jupyterlab/rendermime', '@jupyterlab/services', '@lumino/widgets'];

  function plugin(apputils, rendermimes, services, widgets) {
    return {
      id: 'carme-use:panel',
      description: 'What the session uses of what it requested, and what to change.',
      autoStart: true,
      optional: [apputils.ICommandPalette, rendermimes.IRenderMimeRegistry],
      activate: (app, palette, rendermime) => activate(app, palette, rendermime, { services, widgets })
    };
  }

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB['carme-use'] = {
    init: packages => {
      shared = packages;
    },
    get: async () => {
      help = await helping;
      return help.extension(shared, PACKAGES, plugin);
    }
  };
})();
