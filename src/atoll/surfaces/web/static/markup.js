// Markup in scripts: htm's templates make preact's elements.
import { h } from "preact";
import htm from "htm";

export const html = htm.bind(h);
