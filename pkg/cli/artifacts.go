package cli

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"os"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/imagesign"
)

func artifactColumns() []column[client.Artifact] {
	return []column[client.Artifact]{
		{"REPOSITORY", func(t client.Artifact) string { return t.Repository }},
		{"DIGEST", func(t client.Artifact) string { return t.Digest }},
		{"APP", func(t client.Artifact) string { return t.AppSlug + " " + t.AppVersion }},
		{"STATUS", func(t client.Artifact) string { return string(t.Status) }},
		{"TRUST", func(t client.Artifact) string { return string(t.TrustState) }},
		{"CHANNEL", func(t client.Artifact) string { return string(t.Channel) }},
		{"ID", func(t client.Artifact) string { return t.ID }},
	}
}

func (a *app) artifactsCommand() *cobra.Command {
	var slug string
	list := listing(a, "list", "Artifacts of the project", cobra.NoArgs, artifactColumns(), func(ctx context.Context, s *session, _ []string, cursor string) ([]client.Artifact, string, error) {
		project, err := s.projectID(ctx)
		if err != nil {
			return nil, "", err
		}
		l, err := client.Read[client.ArtifactList](s.hub.ListArtifacts(ctx, project, &client.ListArtifactsParams{Cursor: cursor, Limit: client.PageSize, AppSlug: slug}, s.editors()...))
		return l.Items, l.NextCursor, err
	})
	list.Flags().StringVar(&slug, "app", "", "only of this app")
	return group("artifacts", "Images of an app", list, a.pushCommand())
}

func (a *app) pushCommand() *cobra.Command {
	intent := client.PublishIntentCreate{ArtifactName: "runtime"}
	var keyFile, channel string
	c := a.action("push APP VERSION IMAGE", "Push an image, sign it and register its digest", cobra.ExactArgs(3), func(ctx context.Context, s *session, args []string) error {
		key, err := readPrivateKey(keyFile)
		if err != nil {
			return err
		}
		image, err := openImage(args[2])
		if err != nil {
			return err
		}
		intent.AppSlug, intent.AppVersion, intent.Channel, intent.ArtifactKind = args[0], args[1], client.Channel(channel), client.ArtifactKindOci
		project, err := s.projectID(ctx)
		if err != nil {
			return err
		}
		artifact, err := s.push(ctx, project, intent, image, key)
		if err != nil {
			return err
		}
		return show(s, artifact, artifactColumns())
	})
	c.Long = `Push an image, sign it and register its digest.

IMAGE is a file that "docker save" would write, or the directory of an OCI layout with one image. The publisher's key signs
in cosign's form; the manifest then names the image as REPOSITORY@DIGEST.`
	f := c.Flags()
	f.StringVar(&intent.ArtifactName, "name", intent.ArtifactName, "name of the artifact within the app")
	f.StringVar(&channel, "channel", string(client.ChannelDev), "dev, stage or prod")
	f.StringVar(&keyFile, "key", "", "publisher's private key (PEM)")
	return c
}

// push goes the way of every publisher: intent, registry, signature, registration.
func (s *session) push(ctx context.Context, project string, want client.PublishIntentCreate, image v1.Image, key ed25519.PrivateKey) (client.Artifact, error) {
	intent, err := client.Read[client.PublishIntent](s.hub.CreatePublishIntent(ctx, project, want))
	if err != nil {
		return client.Artifact{}, err
	}
	digest, err := image.Digest()
	if err != nil {
		return client.Artifact{}, fmt.Errorf("read the image: %w", err)
	}
	media, err := image.MediaType()
	if err != nil {
		return client.Artifact{}, fmt.Errorf("read the image: %w", err)
	}
	transport, err := s.registryTransport()
	if err != nil {
		return client.Artifact{}, err
	}
	repository, err := name.NewRepository(intent.RegistryHost + "/" + intent.Repository)
	if err != nil {
		return client.Artifact{}, fmt.Errorf("the hub named a repository that cannot be used: %w", err)
	}
	options := []remote.Option{
		remote.WithContext(ctx), remote.WithTransport(transport),
		remote.WithAuth(&authn.Basic{Username: intent.Credentials.Username, Password: intent.Credentials.Password}),
	}
	s.progress.note("pushing " + digest.String())
	if err := remote.Write(repository.Tag(or(intent.Tag, "latest")), image, options...); err != nil {
		return client.Artifact{}, fmt.Errorf("push to the registry: %w", err)
	}
	signature, err := signatureImage(intent.Repository, digest.String(), key)
	if err != nil {
		return client.Artifact{}, err
	}
	if err := remote.Write(repository.Tag(imagesign.Tag(digest.String())), signature, options...); err != nil {
		return client.Artifact{}, fmt.Errorf("push the signature: %w", err)
	}
	return client.Read[client.Artifact](s.hub.RegisterArtifact(ctx, project, client.ArtifactRegister{
		AppSlug: want.AppSlug, AppVersion: want.AppVersion, ArtifactName: want.ArtifactName, ArtifactKind: client.ArtifactKindOci,
		Repository: intent.Repository, Digest: digest.String(), Tag: intent.Tag, MediaType: string(media), Channel: want.Channel,
	}, s.editors()...))
}

// signatureImage is cosign's .sig image: one layer, the payload, with the signature as its annotation.
func signatureImage(repository, digest string, key ed25519.PrivateKey) (v1.Image, error) {
	payload, err := imagesign.Payload(repository, digest)
	if err != nil {
		return nil, err
	}
	layer := static.NewLayer(payload, imagesign.MediaTypePayload)
	image, err := mutate.Append(mutate.MediaType(empty.Image, types.OCIManifestSchema1), mutate.Addendum{
		Layer:       layer,
		Annotations: map[string]string{imagesign.AnnotationSignature: base64.StdEncoding.EncodeToString(ed25519.Sign(key, payload))},
	})
	if err != nil {
		return nil, fmt.Errorf("make the signature image: %w", err)
	}
	return mutate.ConfigMediaType(image, types.OCIConfigJSON), nil
}

// openImage reads a docker-save file or an OCI layout.
func openImage(path string) (v1.Image, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, usage(err)
	}
	if !info.IsDir() {
		image, err := tarball.ImageFromPath(path, nil)
		if err != nil {
			return nil, usage(fmt.Errorf("%s is not an image as docker save writes it: %w", path, err))
		}
		return image, nil
	}
	index, err := layout.ImageIndexFromPath(path)
	if err != nil {
		return nil, usage(fmt.Errorf("%s is not an OCI layout: %w", path, err))
	}
	list, err := index.IndexManifest()
	if err != nil {
		return nil, usage(fmt.Errorf("%s is not an OCI layout: %w", path, err))
	}
	if len(list.Manifests) != 1 {
		return nil, usage(fmt.Errorf("%s holds %d images instead of one", path, len(list.Manifests)))
	}
	return index.Image(list.Manifests[0].Digest)
}

// registryTransport trusts the hub's authority, as the API client does: the registry is on the same port.
func (s *session) registryTransport() (http.RoundTripper, error) {
	base, ok := http.DefaultTransport.(*http.Transport)
	if !ok {
		return nil, errors.New("no HTTP transport")
	}
	t := base.Clone()
	t.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	if len(s.conf.CAPEM) > 0 {
		t.TLSClientConfig.RootCAs = x509.NewCertPool()
		t.TLSClientConfig.RootCAs.AppendCertsFromPEM(s.conf.CAPEM)
	}
	return t, nil
}
