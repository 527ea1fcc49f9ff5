package main

import (
	"fmt"
	"slices"
	"strings"
)

// call is an operation as a method.
type call struct {
	positional, keywords []string
	query, headers       []string
	path                 string
	paged                bool
}

// operation writes the method of an operation.
func (p *printer) operation(o operation) {
	c := p.callOf(o)
	kind, answer := o.success()
	result, statement := "None", ""
	lines := kind != "" && kind != "application/json"
	args := []string{c.path}
	switch item := p.itemOf(answer); {
	case lines:
		result, statement = "Iterator[str]", "self._lines("
	case c.paged && item != "":
		result, statement = "Iterator["+item+"]", "self._pages("
		args = append(args, last(answer.Ref))
	default:
		if answer.Ref != "" {
			result = last(answer.Ref)
		}
		statement, args = "self._call(", []string{fmt.Sprintf("%q", o.method), c.path, answerType(result)}
	}
	if len(c.query) > 0 || strings.Contains(statement, "_pages") {
		args = append(args, "query={"+strings.Join(c.query, ", ")+"}")
	}
	if len(c.headers) > 0 {
		args = append(args, "headers={"+strings.Join(c.headers, ", ")+"}")
	}
	if o.RequestBody != nil {
		args = append(args, "body=body")
	}
	parameters := append([]string{"self"}, c.positional...)
	if len(c.keywords) > 0 {
		parameters = append(append(parameters, "*"), c.keywords...)
	}
	fmt.Fprintf(p, "\n    def %s(\n        %s,\n    ) -> %s:\n        %s\n        return %s\n            %s,\n        )\n",
		snake(o.ID), strings.Join(parameters, ",\n        "), result, docstring(o.doc(), o.ID), statement,
		strings.Join(args, ",\n            "))
}

// answerType is the expression that names the type of an answer at run time.
func answerType(result string) string {
	if result == "None" {
		return "type(None)"
	}
	return result
}

// doc is the summary with the permission that the caller needs.
func (o operation) doc() string {
	if o.Permission == "" {
		return o.Summary
	}
	return o.Summary + "; needs " + o.Permission
}

// callOf sorts the parameters of an operation.
func (p *printer) callOf(o operation) call {
	c := call{path: `"` + o.path + `"`}
	for _, at := range o.Parameters {
		name, required := identifier(strings.ToLower(at.Name)), at.Required
		annotation := p.typeOf(camel(o.ID)+camel(identifier(at.Name)), at.Schema)
		keyword := fmt.Sprintf("%s: %s", name, annotation)
		if !required {
			keyword += " | None = None"
		}
		switch {
		case at.In == "path":
			c.positional = append(c.positional, name+": str")
			c.path = "f" + strings.TrimPrefix(strings.ReplaceAll(c.path, "{"+at.Name+"}", "{quote("+name+", safe='')}"), "f")
		case at.Name == "X-Request-ID":
		case at.Name == "X-Idempotency-Key":
			c.keywords = append(c.keywords, "idempotency_key: str | None = None")
			c.headers = append(c.headers, `"X-Idempotency-Key": idempotency_key`)
		case at.In == "header":
			c.keywords = append(c.keywords, keyword)
			c.headers = append(c.headers, fmt.Sprintf("%q: %s", at.Name, name))
		case at.Name == "cursor":
			c.paged = true
		case at.Name == "limit" && slices.ContainsFunc(o.Parameters, func(q parameter) bool { return q.Name == "cursor" }):
		default:
			c.keywords = append(c.keywords, keyword)
			c.query = append(c.query, fmt.Sprintf("%q: %s", at.Name, name))
		}
	}
	if o.RequestBody != nil {
		body := "body: " + last(o.RequestBody.Content["application/json"].Schema.Ref)
		if !o.RequestBody.Required {
			body += " | None = None"
		}
		c.positional = append(c.positional, body)
	}
	return c
}

// itemOf returns the type of the items of a page; empty for what is no page.
func (p *printer) itemOf(answer schema) string {
	items, ok := p.contract.Components.Schemas[last("/"+answer.Ref)].Properties["items"]
	if !ok || items.Items == nil {
		return ""
	}
	return p.typeOf("", *items.Items)
}
