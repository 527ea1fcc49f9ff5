package manifest

import (
	"net/url"
	"strconv"
	"strings"
)

// maxSubschemas bounds what one value is validated against. A validator remembers nothing: definitions that each refer
// to the next one twice would double its work at every step, and keep a hub or a node from all else.
const maxSubschemas = 2000

// countSubschemas counts those of an embedded schema, its references written out as deep as a value may nest. Above
// maxSubschemas it stops counting.
func countSubschemas(schema map[string]any) int {
	return newSubschemas(schema).of(schema, MaxDepth)
}

func newSubschemas(schema map[string]any) subschemas {
	s := subschemas{root: schema, anchors: map[string]any{}, behind: map[reference]int{}}
	s.findAnchors(schema)
	return s
}

type subschemas struct {
	root    map[string]any
	anchors map[string]any
	// behind are those that a reference leads to.
	behind map[reference]int
}

// reference is one that may be followed by so many others.
type reference struct {
	to    string
	depth int
}

func (s subschemas) findAnchors(v any) {
	switch v := v.(type) {
	case map[string]any:
		for key, child := range v {
			if name, is := child.(string); is && (key == "$anchor" || key == "$dynamicAnchor") {
				s.anchors[name] = v
			}
			s.findAnchors(child)
		}
	case []any:
		for _, child := range v {
			s.findAnchors(child)
		}
	}
}

func (s subschemas) of(v any, depth int) (count int) {
	switch v := v.(type) {
	case map[string]any:
		count = 1
		for key, child := range v {
			if to, is := child.(string); is && (key == "$ref" || key == "$dynamicRef") {
				count += s.following(reference{to, depth})
			} else {
				count += s.of(child, depth)
			}
			if count > maxSubschemas {
				break
			}
		}
	case []any:
		for _, child := range v {
			if count += s.of(child, depth); count > maxSubschemas {
				break
			}
		}
	}
	return count
}

func (s subschemas) following(r reference) int {
	if r.depth == 0 {
		return 0 // no value nests as deep
	}
	count, known := s.behind[r]
	if !known {
		count = s.of(s.target(r.to), r.depth-1)
		s.behind[r] = count
	}
	return count
}

// target is what a reference within the document leads to, by its pointer or its anchor; nil where it leads nowhere.
func (s subschemas) target(to string) any {
	fragment, err := url.PathUnescape(strings.TrimPrefix(to, "#"))
	if err != nil {
		return nil
	}
	if fragment != "" && fragment[0] != '/' {
		return s.anchors[fragment]
	}
	var at any = s.root
	for _, step := range strings.Split(fragment, "/")[1:] {
		step = strings.ReplaceAll(strings.ReplaceAll(step, "~1", "/"), "~0", "~")
		switch parent := at.(type) {
		case map[string]any:
			at = parent[step]
		case []any:
			i, err := strconv.Atoi(step)
			if err != nil || i < 0 || i >= len(parent) {
				return nil
			}
			at = parent[i]
		default:
			return nil
		}
	}
	return at
}
