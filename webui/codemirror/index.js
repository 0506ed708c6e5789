// What the portal's script editor (static/carme/script.js) uses, as the global `CodeMirror`.
export { defaultKeymap, history, historyKeymap } from "@codemirror/commands";
export { HighlightStyle, StreamLanguage, bracketMatching, syntaxHighlighting } from "@codemirror/language";
export { python } from "@codemirror/legacy-modes/mode/python";
export { shell } from "@codemirror/legacy-modes/mode/shell";
export { Compartment, EditorState } from "@codemirror/state";
export { Decoration, EditorView, MatchDecorator, ViewPlugin, drawSelection, keymap, lineNumbers } from "@codemirror/view";
export { tags } from "@lezer/highlight";
