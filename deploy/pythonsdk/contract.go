package main

import (
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// contract is what the SDK needs of openapi.yaml.
type contract struct {
	Paths      map[string]map[string]operation `yaml:"paths"`
	Components struct {
		Schemas    map[string]schema    `yaml:"schemas"`
		Parameters map[string]parameter `yaml:"parameters"`
	} `yaml:"components"`
}

type operation struct {
	ID          string      `yaml:"operationId"`
	Summary     string      `yaml:"summary"`
	Parameters  []parameter `yaml:"parameters"`
	RequestBody *struct {
		Required bool             `yaml:"required"`
		Content  map[string]media `yaml:"content"`
	} `yaml:"requestBody"`
	Responses map[string]struct {
		Content map[string]media `yaml:"content"`
	} `yaml:"responses"`
	Security   []map[string][]string `yaml:"security"`
	Permission string                `yaml:"x-permission"`

	method, path string
}

type media struct {
	Schema schema `yaml:"schema"`
}

type parameter struct {
	Ref      string `yaml:"$ref"`
	Name     string `yaml:"name"`
	In       string `yaml:"in"`
	Required bool   `yaml:"required"`
	Schema   schema `yaml:"schema"`
}

type schema struct {
	Ref         string            `yaml:"$ref"`
	Type        string            `yaml:"type"`
	Format      string            `yaml:"format"`
	Description string            `yaml:"description"`
	Enum        []string          `yaml:"enum"`
	Required    []string          `yaml:"required"`
	Properties  map[string]schema `yaml:"properties"`
	Items       *schema           `yaml:"items"`
	// AdditionalProperties is false, true or a schema.
	AdditionalProperties yaml.Node `yaml:"additionalProperties"`
}

func readContract(text []byte) (c contract, err error) {
	return c, yaml.Unmarshal(text, &c)
}

// operations returns them in the order of their ids, with their parameters resolved.
func (c contract) operations() []operation {
	var out []operation
	for path, item := range c.Paths {
		for method, o := range item {
			o.method, o.path = strings.ToUpper(method), path
			for i, p := range o.Parameters {
				if p.Ref != "" {
					o.Parameters[i] = c.Components.Parameters[last(p.Ref)]
				}
			}
			out = append(out, o)
		}
	}
	slices.SortFunc(out, func(a, b operation) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// success returns the media type and the schema of the answer; both are empty where there is no body.
func (o operation) success() (string, schema) {
	for _, status := range slices.Sorted(maps.Keys(o.Responses)) {
		if !strings.HasPrefix(status, "2") {
			continue
		}
		for _, kind := range slices.Sorted(maps.Keys(o.Responses[status].Content)) {
			return kind, o.Responses[status].Content[kind].Schema
		}
	}
	return "", schema{}
}

// last is the name at the end of a reference.
func last(ref string) string { return ref[strings.LastIndex(ref, "/")+1:] }
