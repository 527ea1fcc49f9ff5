package compose

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// Bounds of what aliases can make of a file.
const (
	maxNodes = 100_000
	maxDepth = 64
)

// document is the file with the lines of its keys.
type document struct{ root *yaml.Node }

func parse(file []byte) (document, error) {
	dec := yaml.NewDecoder(bytes.NewReader(file))
	var root, more yaml.Node
	if err := dec.Decode(&root); err != nil {
		return document{}, fmt.Errorf("read the Compose file: %w", err)
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return document{}, errors.New("the Compose file must be one YAML document")
	}
	if len(root.Content) != 1 || root.Content[0].Kind != yaml.MappingNode {
		return document{}, errors.New("the Compose file must be a mapping with the key services")
	}
	return document{root.Content[0]}, nil
}

// allowed are the patterns of the keys that are converted; * stands for any name, [] for an item of a list. Whatever
// stands below a key that ends a pattern is allowed.
func allowed() []string {
	return []string{
		"name", "version", "configs.*.content", "configs.*.name", "networks.*.driver", "networks.*.name",
		"services.*.annotations", "services.*.cap_add", "services.*.command", "services.*.configs.[].mode",
		"services.*.configs.[].source", "services.*.configs.[].target", "services.*.container_name",
		"services.*.cpus", "services.*.depends_on.*.condition", "services.*.deploy.labels",
		"services.*.deploy.resources.limits.cpus", "services.*.deploy.resources.limits.memory",
		"services.*.deploy.resources.limits.pids", "services.*.deploy.resources.reservations.cpus",
		"services.*.deploy.resources.reservations.devices.[].capabilities",
		"services.*.deploy.resources.reservations.devices.[].count",
		"services.*.deploy.resources.reservations.devices.[].driver",
		"services.*.deploy.resources.reservations.memory", "services.*.entrypoint", "services.*.environment",
		"services.*.expose", "services.*.gpus.[].capabilities", "services.*.gpus.[].count", "services.*.gpus.[].driver",
		"services.*.healthcheck.disable", "services.*.healthcheck.interval", "services.*.healthcheck.retries",
		"services.*.healthcheck.start_interval", "services.*.healthcheck.start_period", "services.*.healthcheck.test",
		"services.*.healthcheck.timeout", "services.*.image", "services.*.labels", "services.*.mem_limit",
		"services.*.mem_reservation", "services.*.networks.*.aliases", "services.*.pids_limit",
		"services.*.ports.[].app_protocol", "services.*.ports.[].host_ip", "services.*.ports.[].mode",
		"services.*.ports.[].name", "services.*.ports.[].protocol", "services.*.ports.[].published",
		"services.*.ports.[].target", "services.*.read_only", "services.*.restart", "services.*.shm_size",
		"services.*.stop_grace_period", "services.*.tmpfs", "services.*.user", "services.*.volumes.[].bind",
		"services.*.volumes.[].read_only", "services.*.volumes.[].source", "services.*.volumes.[].target",
		"services.*.volumes.[].tmpfs.size", "services.*.volumes.[].type", "services.*.volumes.[].volume.labels",
		"services.*.volumes.[].volume.nocopy", "services.*.working_dir", "volumes.*.driver_opts.size", "volumes.*.labels",
		"volumes.*.name",
	}
}

// reasons say why a key is refused, and what to write instead, where that is more than that it is not supported.
func reasons() map[string]string {
	const oneFile = "everything must stand in this file"
	const shared = "a container shares no namespace with the host or another container"
	return map[string]string{
		"include":                          oneFile,
		"volumes.*.driver":                 "a volume lies on the disk of the node",
		"volumes.*.external":               "convert it, then write scope: project in the manifest",
		"secrets":                          "a manifest is no place for secrets: everyone who may launch the app may read it",
		"services.*.build":                 "build and push the image first, and name it by its digest",
		"services.*.cap_drop":              "a container has a short list of capabilities; give it a user instead of root",
		"services.*.deploy.replicas":       "each service is one container",
		"services.*.deploy.restart_policy": "write restart",
		"services.*.devices":               "accelerators are asked for with gpus or deploy.resources.reservations.devices",
		"services.*.env_file":              oneFile,
		"services.*.extends":               oneFile,
		"services.*.ipc":                   shared,
		"services.*.links":                 "services reach each other by their names",
		"services.*.network_mode":          shared,
		"services.*.pid":                   shared,
		"services.*.privileged":            "no container has the rights of the host",
		"services.*.profiles":              "every service of the file runs",
		"services.*.scale":                 "each service is one container",
		"services.*.secrets":               "a manifest is no place for secrets: everyone who may launch the app may read it",
		"services.*.userns_mode":           shared,
		"services.*.uts":                   shared,
		"services.*.volumes_from":          "services share no files",

		"services.*.volumes.[].volume.subpath": "a service has all of a volume; give it one of its own",
	}
}

// check finds the keys that are not converted and the variables.
func (d document) check() []Refusal {
	w := &walk{patterns: map[string]bool{}, reasons: reasons()}
	for _, pattern := range allowed() {
		for end := range len(pattern) {
			if pattern[end] == '.' {
				w.patterns[pattern[:end]] = false
			}
		}
		w.patterns[pattern] = true
	}
	w.mapping(d.root, nil, "")
	if w.nodes > maxNodes {
		w.refusals = []Refusal{{Line: 1, Key: "services", Reason: "has too many values, or nests too deep"}}
	}
	return w.refusals
}

type walk struct {
	patterns map[string]bool
	reasons  map[string]string
	refusals []Refusal
	nodes    int
}

// value checks what stands at a path; pattern is empty below a key that ends a pattern.
func (w *walk) value(n *yaml.Node, path []string, pattern string) {
	if w.nodes++; len(path) > maxDepth {
		w.nodes = maxNodes + 1
	}
	if w.nodes > maxNodes {
		return
	}
	switch n.Kind {
	case yaml.AliasNode:
		w.value(n.Alias, path, pattern)
	case yaml.MappingNode:
		w.mapping(n, path, pattern)
	case yaml.SequenceNode:
		for i, item := range n.Content {
			next := pattern
			if pattern != "" {
				next = pattern + ".[]"
			}
			w.value(item, append(slices.Clip(path), strconv.Itoa(i)), next)
		}
	case yaml.ScalarNode:
		if strings.Contains(strings.ReplaceAll(n.Value, "$$", ""), "$") {
			w.refusals = append(w.refusals, Refusal{
				n.Line, strings.Join(path, "."), "refers to a variable; nothing is taken from the environment",
				"write the value, or $$ for a dollar sign",
			})
		}
	case yaml.DocumentNode:
	}
}

func (w *walk) mapping(n *yaml.Node, path []string, pattern string) {
	root := len(path) == 0
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if key.Value == "<<" {
			w.merged(value, path, pattern)
			continue
		}
		here := append(slices.Clip(path), key.Value)
		if pattern == "" && !root {
			w.value(value, here, "")
			continue
		}
		if strings.HasPrefix(key.Value, "x-") && (root || w.known(pattern+"."+key.Value) == "") {
			w.count(value)
			continue
		}
		next := key.Value
		if !root {
			next = pattern + "." + key.Value
		}
		known := w.known(next)
		switch {
		case known == "":
			w.refusals = append(w.refusals, w.refusal(key.Line, here, next))
		case w.patterns[known]:
			w.value(value, here, "")
		default:
			w.value(value, here, known)
		}
	}
}

// count counts what stands in an extension field, which may be merged elsewhere.
func (w *walk) count(n *yaml.Node) {
	if w.nodes++; w.nodes > maxNodes {
		return
	}
	if n.Kind == yaml.AliasNode {
		w.count(n.Alias)
	}
	for _, c := range n.Content {
		w.count(c)
	}
}

func (w *walk) merged(n *yaml.Node, path []string, pattern string) {
	switch n.Kind {
	case yaml.AliasNode:
		w.merged(n.Alias, path, pattern)
	case yaml.MappingNode:
		if w.nodes++; w.nodes <= maxNodes {
			w.mapping(n, path, pattern)
		}
	case yaml.SequenceNode:
		for _, item := range n.Content {
			w.merged(item, path, pattern)
		}
	case yaml.DocumentNode, yaml.ScalarNode:
	}
}

// known is the pattern of a key, or of any name in its place; empty where there is none.
func (w *walk) known(pattern string) string {
	for _, p := range []string{pattern, anyName(pattern)} {
		if _, ok := w.patterns[p]; ok {
			return p
		}
	}
	return ""
}

func anyName(pattern string) string { return pattern[:strings.LastIndexByte(pattern, '.')+1] + "*" }

func (w *walk) refusal(line int, path []string, pattern string) Refusal {
	r := Refusal{Line: line, Key: strings.Join(path, "."), Reason: "is not supported"}
	r.Hint = w.reasons[pattern]
	return r
}

// find follows a path; what is missing ends it at the last node that is there.
func (d document) find(path ...string) (n *yaml.Node, line int, found bool) {
	n, line = d.root, 1
	for _, step := range path {
		key, value := child(n, step)
		if value == nil {
			return n, line, false
		}
		n, line = value, key.Line
	}
	return n, line, true
}

func child(n *yaml.Node, step string) (key, value *yaml.Node) {
	switch n.Kind {
	case yaml.AliasNode:
		return child(n.Alias, step)
	case yaml.MappingNode:
		var merged []*yaml.Node
		for i := 0; i+1 < len(n.Content); i += 2 {
			switch n.Content[i].Value {
			case step:
				return n.Content[i], n.Content[i+1]
			case "<<":
				merged = mergedIn(n.Content[i+1])
			}
		}
		for _, m := range merged {
			if key, value = child(m, step); value != nil {
				return key, value
			}
		}
	case yaml.SequenceNode:
		if i, err := strconv.Atoi(step); err == nil && i < len(n.Content) {
			return n.Content[i], n.Content[i]
		}
		for _, item := range n.Content {
			if item.Kind == yaml.ScalarNode && item.Value == step {
				return item, item
			}
		}
	case yaml.DocumentNode, yaml.ScalarNode:
	}
	return nil, nil
}

// mergedIn are what a merge key names; the first that has a key counts.
func mergedIn(value *yaml.Node) []*yaml.Node {
	if value.Kind == yaml.SequenceNode {
		return value.Content
	}
	return []*yaml.Node{value}
}

func (d document) line(path ...string) int {
	_, line, _ := d.find(path...)
	return line
}

// value is the scalar at a path; empty where there is none.
func (d document) value(path ...string) string {
	if n, _, found := d.find(path...); found && n.Kind == yaml.ScalarNode {
		return n.Value
	}
	return ""
}

// keys are those of the mapping at a path, and those that are merged into it, in the order of the file.
func (d document) keys(path ...string) []string {
	n, _, found := d.find(path...)
	if !found {
		return nil
	}
	return appendKeys(nil, n)
}

func appendKeys(names []string, n *yaml.Node) []string {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Kind != yaml.MappingNode {
		return names
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if key := n.Content[i].Value; key != "<<" {
			if !slices.Contains(names, key) {
				names = append(names, key)
			}
			continue
		}
		for _, m := range mergedIn(n.Content[i+1]) {
			names = appendKeys(names, m)
		}
	}
	return names
}

// encode writes a manifest as YAML in block style, in the order of its keys.
func encode(m manifest.Manifest) ([]byte, error) {
	data, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode the manifest: %w", err)
	}
	var node yaml.Node
	if err := yaml.Unmarshal(data, &node); err != nil {
		return nil, fmt.Errorf("encode the manifest: %w", err)
	}
	inBlocks(&node)
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(&node), enc.Close()); err != nil {
		return nil, fmt.Errorf("encode the manifest: %w", err)
	}
	return b.Bytes(), nil
}

func inBlocks(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		inBlocks(c)
	}
}

// hostNames are the names that a service may have in a manifest; another one of Compose becomes an alias.
var hostNames = regexp.MustCompile(`^[a-z]([a-z0-9-]*[a-z0-9])?$`)

// hostName is the name of a service in the manifest.
func hostName(name string) string {
	if hostNames.MatchString(name) {
		return name
	}
	return strings.Trim(regexp.MustCompile(`[^a-z0-9]+`).ReplaceAllString(strings.ToLower(name), "-"), "-")
}
