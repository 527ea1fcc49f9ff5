package scenario

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

// Publisher is an app team: a key that the catalog role lets sign for the org's repositories, and a service account
// that pushes.
type Publisher struct {
	Signer protocol.Signer
	Hub    *client.Hub
}

// NewPublisher makes the team's key, has the offline catalog key delegate to it, and registers the delegation.
func (t *Tenant) NewPublisher(ctx context.Context) (*Publisher, error) {
	key, public := filepath.Join(t.dir, "publisher.key"), filepath.Join(t.dir, "publisher.pub")
	signer, err := appkit.GenerateKey(key, public)
	if err != nil {
		return nil, fmt.Errorf("publisher key: %w", err)
	}
	delegation, err := devcluster.Delegate(ctx, t.hub, public, t.Org.Slug, "org/"+t.Org.Slug+"/")
	if err != nil {
		return nil, err
	}
	var env client.SignedEnvelope
	if err := json.Unmarshal(delegation, &env); err != nil {
		return nil, fmt.Errorf("the delegation is no envelope: %w", err)
	}
	if _, err := client.Read[client.Publisher](t.Admin.RegisterPublisher(ctx,
		client.PublisherRegister{Delegation: env})); err != nil {
		return nil, fmt.Errorf("register publisher: %w", err)
	}
	hub, err := t.ServiceAccount(ctx, "publisher", client.ServiceAccountRoleAppPublisher)
	return &Publisher{Signer: signer, Hub: hub}, err
}

// Release is one version of an app, ready to ship.
type Release struct {
	AppSlug, Version string
	// Image is the one of an app with one container.
	Image v1.Image
	// Images are those of an app with several services, by the names of their artifacts.
	Images map[string]v1.Image
	// Template is the manifest with ${version} in it, and with ${image}, or ${name_image} for each of Images.
	Template []byte
}

// artifactName is the artifact of Release.Image.
const artifactName = "runtime"

// Ship pushes and signs the images with the credentials of publish intents, registers the digests, signs and registers
// the manifest, and publishes the version. It returns the manifest's document.
func (t *Tenant) Ship(ctx context.Context, p *Publisher, r Release) (doc []byte, err error) {
	values := map[string]string{"version": r.Version}
	if r.Image != nil {
		if values["image"], err = t.Push(ctx, p, r); err != nil {
			return nil, err
		}
	}
	for name, image := range r.Images {
		if values[name+"_image"], err = t.push(ctx, p, r, name, image); err != nil {
			return nil, err
		}
	}
	doc, err = appkit.FillTemplate(r.Template, values)
	if err != nil {
		return nil, err
	}
	return doc, t.Publish(ctx, p, r.AppSlug, r.Version, doc)
}

// Push uploads the signed Release.Image and registers its digest; it returns <repository>@<digest>.
func (t *Tenant) Push(ctx context.Context, p *Publisher, r Release) (string, error) {
	return t.push(ctx, p, r, artifactName, r.Image)
}

func (t *Tenant) push(ctx context.Context, p *Publisher, r Release, name string, image v1.Image) (string, error) {
	intent, err := client.Read[client.PublishIntent](p.Hub.CreatePublishIntent(ctx, t.Project.ID,
		client.PublishIntentCreate{
			AppSlug: r.AppSlug, AppVersion: r.Version, ArtifactName: name, Channel: client.ChannelDev,
		}))
	if err != nil {
		return "", fmt.Errorf("publish intent: %w", err)
	}
	pushed, err := appkit.Push(ctx, image, appkit.Target{
		RegistryHost: intent.RegistryHost, Repository: intent.Repository, Tag: intent.Tag,
		Username: intent.Credentials.Username, Password: intent.Credentials.Password, CAFile: t.ca,
	}, p.Signer, nil)
	if err != nil {
		return "", fmt.Errorf("push: %w", err)
	}
	a, err := client.Read[client.Artifact](p.Hub.RegisterArtifact(ctx, t.Project.ID, client.ArtifactRegister{
		AppSlug: r.AppSlug, AppVersion: r.Version, ArtifactName: name, Repository: pushed.Repository,
		Digest: pushed.Digest, MediaType: pushed.MediaType,
	}))
	if err != nil {
		return "", fmt.Errorf("register artifact: %w", err)
	}
	if a.TrustState != client.ArtifactTrustStateVerified {
		return "", fmt.Errorf("the artifact is %s", a.TrustState)
	}
	return pushed.Repository + "@" + pushed.Digest, nil
}

// Publish signs and registers the manifest and makes the version active.
func (t *Tenant) Publish(ctx context.Context, p *Publisher, appSlug, version string, doc []byte) error {
	signed, err := appkit.SignManifest(doc, p.Signer)
	if err != nil {
		return fmt.Errorf("sign manifest: %w", err)
	}
	var env client.SignedEnvelope
	if err := json.Unmarshal(signed, &env); err != nil {
		return err
	}
	if _, err := client.Read[client.AppVersion](t.Admin.RegisterManifest(ctx,
		client.ManifestRegister{ManifestEnvelope: env})); err != nil {
		return fmt.Errorf("register manifest: %w", err)
	}
	_, err = client.Read[client.AppVersion](t.Admin.PublishAppVersion(ctx, appSlug, version, client.AppVersionMove{}))
	if err != nil {
		return fmt.Errorf("publish version: %w", err)
	}
	return nil
}
