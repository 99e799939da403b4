// Short names for what is done with the document's elements.

export const $ = id => document.getElementById(id);

/** Return a new element with these properties and children. */
export function make(name, properties = {}, children = []) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}
